"""What a step reaches of the figures of a data sheet.

The constants are calibrated on a part of the runs of docs/published.md; the others judge.
"""

from dataclasses import dataclass, replace

from hpctrain.hardware import Hardware

LINK = 0.8  # of the bandwidth that NCCL's large messages reach (assumption)


@dataclass(frozen=True)
class Efficiencies:
    """What a step reaches of the figures of a data sheet."""

    best: float = 0.75  # of the peak: what the largest products reach; between A100 and H100
    # The part of the time of reading operands that computing does not hide: a product of size s
    # reaches s / (s + half x peak / bandwidth) of `best`.
    half: float = 0.06
    fp8: float = 0.9  # of `best`: what a product in fp8 reaches of its peak beside one in 16 bits
    tf32: float = 0.55  # of `best`, likewise
    convolution: float = 0.8  # `half` of convolutions
    attention: float = 0.35  # of the peak (flash kernel)
    traffic: float = 8.0  # how often the bytes of the activations go through the memory in a step
    fused: float = 3.0  # the same, where torch.compile fuses
    memory: float = 0.8  # of the HBM bandwidth
    overlap: float = 0.9  # of the computing time, behind which communication can hide
    contention: float = 0.65  # of hidden communication: so much it slows the computing beside it
    launch_s: float = 6e-6  # in which the CPU starts one operation
    host_link: float = 20e9  # bytes/s between GPU and host
    host_memory: float = 20e9  # bytes/s of the memory of the host, for each GPU

    def on(self, hardware: Hardware) -> "Efficiencies":
        """Return them with what the hardware says itself."""
        link = hardware.host.bandwidth
        return replace(
            self,
            best=hardware.matmul_efficiency or self.best,
            attention=hardware.attention_efficiency or self.attention,
            host_link=self.host_link if link is None else link * LINK,
        )

    @property
    def assumptions(self) -> dict[str, str]:
        """What the answer says about them."""
        return {
            "products": f"{self.best:.0%} of the dense peak at most, less for small ones; in fp8 "
            f"{self.fp8:.0%} of that",
            "attention": f"{self.attention:.0%} of the peak, half of the square",
            "memory": f"{self.memory:.0%} of the HBM bandwidth; activations pass it "
            f"{self.traffic:g} times, with torch.compile {self.fused:g} times",
            "offload": f"{self.host_link / 1e9:.3g} GB/s to the host, whose memory gives "
            f"{self.host_memory / 1e9:g} GB/s for each GPU",
            "overlap": f"communication hides behind {self.overlap:.0%} of the computing and slows "
            f"it by {self.contention:.0%} of its own time",
        }
