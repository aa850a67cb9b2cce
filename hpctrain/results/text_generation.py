"""Draw text from a trained language model.

run directory ── config, newest intact checkpoint ── model ──┐
data set ── tokenizer ── prompt as tokens ───────────────────┴── next token ── text
↑──────────────────────────────────┘
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import nn

from hpctrain.base.errors import ConfigError
from hpctrain.config.sections import ModelSections
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.distributed.devices import unused_gpu
from hpctrain.results.loaded import LoadedRun
from hpctrain.results.trained_model import trained_model
from hpctrain.tasks import LanguageModel
from hpctrain.tasks.dataset_tokenizer import DatasetTokenizer

log = logging.getLogger(__name__)
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Generator:
    """Continues texts: the model maps int64 (1, length) to logits (1, length, vocabulary).

    It sees `context` tokens at a time.
    """

    model: nn.Module
    task: LanguageModel
    tokenizer: DatasetTokenizer
    context: int
    checkpoint: Path

    @classmethod
    def of(cls, path: Path, data: str | None = None) -> Self:
        """Load the model of a run on this process alone, without its optimizer.

        `data` is the folder or URL of the data set with the tokenizer; None is `data.path` of the
        run. A run that is not a language model's is a ConfigError.
        """
        run = LoadedRun(path)
        run.find_code("predict --prompt")
        config = run.config
        task = instantiate("task", config.task)
        if not isinstance(task, LanguageModel):
            raise ConfigError(
                f"{path.name} is no language model: task._target_={config.task.get('_target_')}"
            )
        tokenizer = DatasetTokenizer.of(data or config.data.path, task.tokens)
        checkpoint = run.checkpoint()
        model = trained_model(ModelSections.of(config), checkpoint)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if found := unused_gpu():
            log.warning("the CPU generates: %s", found)
        context = config.data.windows.length - 1
        return cls(model.to(device).eval(), task, tokenizer, context, checkpoint)

    @torch.inference_mode()
    def __call__(self, prompt: str, tokens: int, *, temperature: float, seed: int) -> Iterator[str]:
        """Yield the prompt, then its continuation in pieces of whole characters.

        At most `tokens` are drawn: the text may end early, with the end of a document. The logits
        are divided by the temperature; 0 takes the likeliest token.
        """
        random = torch.Generator().manual_seed(seed)
        ids = self.tokenizer.encode(prompt)
        shown = len(self.tokenizer.decode(ids))
        yield prompt
        text, device = "", next(self.model.parameters()).device
        for _ in range(tokens):
            outputs = self.model(torch.tensor([ids[-self.context :]], device=device))
            # A model may have more logits than there are tokens, rounded up for speed.
            logits = getattr(outputs, "logits", outputs)[0, -1, : self.tokenizer.vocabulary]
            drawn = _draw(logits.float().cpu(), temperature, random)
            if drawn == self.tokenizer.eod:
                break
            ids.append(drawn)
            text = self.tokenizer.decode(ids)[shown:]
            if text and not text.endswith(_INCOMPLETE):
                yield text
                shown, text = shown + len(text), ""
        if text:
            yield text


def _draw(logits: torch.Tensor, temperature: float, random: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # The largest becomes 0, so that a small temperature gives no infinities.
    weights = ((logits - logits.max()) / temperature).softmax(0)
    return int(torch.multinomial(weights, 1, generator=random))
