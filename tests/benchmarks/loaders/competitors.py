"""Lists all loaders that are measured, in the order of the table."""

from tests.benchmarks.loaders import basics, peers
from tests.benchmarks.loaders.competitor import Competitor

BARE = "np.memmap gather, bare loop"
OURS = "hpctrain"
BLOCK = "hpctrain, block shuffle"
MEMMAP = "np.memmap by batch, DataLoader"

COMPETITORS: dict[str, type[Competitor]] = {
    BARE: basics.NumpyGather,
    OURS: basics.Hpctrain,
    BLOCK: basics.HpctrainBlock,
    MEMMAP: basics.Memmap,
    "webdataset": peers.Webdataset,
    "mosaicml-streaming": peers.Streaming,
}
