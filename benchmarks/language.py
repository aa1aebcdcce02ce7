"""Loss of a small GPT after as many tokens under each strategy: `python -m benchmarks language`.

It predicts the next character of Shakespeare's plays. All strategies begin with the same weights, use each
window of the text once an epoch, and take the same steps of AdamW, so that all have read as many tokens in
the end. Then all workers have one model, whose loss on the last tenth of the text is compared. Workers are
not stretched, and share the cores: no time may be read from such a run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.commands import LanguageOptions
from benchmarks.workers import print_progress, read_settings, run_workers, send_result
from offbeat.cli.result import Result, figure_part, machine
from offbeat.data import resolve_data_dir
from offbeat.errors import DataError
from offbeat.models import EncoderLayer
from offbeat.runtime.control import environment
from offbeat.runtime.session import join
from offbeat.strategies import parse_strategy

LOCKSTEP = "bsp"
STRATEGIES = ("diloco:every=16", "diloco:every=16,outer_momentum=0.5")
_FILE = "tinyshakespeare.txt"
_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_VALIDATION_SHARE = 0.1
_EVALUATION_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class LanguageSettings:
    """Settings of one training, for every worker.

    Attributes:
        text: path of the text.
        tokens: of a window.
        width, layers: of the model.
    """

    strategy: str
    text: str
    epochs: int
    batch_size: int
    tokens: int
    width: int
    layers: int
    lr: float
    seed: int


class Gpt(nn.Module):
    """A character-level GPT: causal layers, and the logits of the next character at each place.

    Source: Radford et al. 2019, "Language models are unsupervised multitask learners". Deviations: layer norm
    after each part, as in `EncoderLayer`; no dropout.
    """

    def __init__(self, *, vocabulary: int, tokens: int, width: int, layers: int) -> None:
        """Initialise the weights."""
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(tokens, width)
        self.layers = nn.Sequential(
            *(EncoderLayer(width=width, heads=4, is_causal=True) for _ in range(layers))
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, T, vocabulary) for characters (B, T)."""
        places = torch.arange(x.shape[1], device=x.device)
        logits: Tensor = self.head(self.layers(self.token_embedding(x) + self.position_embedding(places)))
        return logits


def read_windows(path: Path, tokens: int) -> tuple[Tensor, Tensor, int]:
    """Return windows (N, tokens + 1) for training and validation, and the size of the vocabulary.

    The last character of a window is the first one of the next.

    Raises:
        DataError: there is no such file.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise DataError(f"cannot read {path.name}: save {_URL} as {path}, or name its --data-dir") from error
    vocabulary = sorted(set(text))
    codes = torch.tensor([vocabulary.index(character) for character in text])
    split = round(len(codes) * (1 - _VALIDATION_SHARE))
    train, validation = (part.unfold(0, tokens + 1, tokens) for part in (codes[:split], codes[split:]))
    return train, validation, len(vocabulary)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss of the next characters in windows (B, T + 1)."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def run(options: LanguageOptions, *, command: str) -> Result:
    """Train in lockstep and with every strategy.

    Raises:
        OffbeatError: the text is missing, or a worker failed.
        ValueError: an option out of range.
    """
    strategies = dict.fromkeys((LOCKSTEP, *(options.strategy or STRATEGIES)))
    for strategy in strategies:
        parse_strategy(strategy)
    text = Path(resolve_data_dir(options.data_dir)) / _FILE
    read_windows(text, options.tokens)
    rows = []
    for seed in range(options.seeds):
        for strategy in strategies:
            print_progress(f"{strategy}, seed {seed}")
            settings = LanguageSettings(
                strategy=strategy,
                text=str(text),
                epochs=options.epochs,
                batch_size=options.batch_size,
                tokens=options.tokens,
                width=options.width,
                layers=options.layers,
                lr=options.lr,
                seed=seed,
            )
            loss = run_workers(
                "benchmarks.language",
                msgspec.to_builtins(settings),
                options.workers,
                env={environment.SEED_VARIABLE: str(seed)},
            )
            rows.append({"strategy": strategy, "seed": seed, "loss": loss})
    losses = {name: mean(row["loss"] for row in rows if row["strategy"] == name) for name in strategies}
    return Result(
        name="language",
        command=command,
        kind="real",
        seed=0,
        figures={
            **{f"loss_{figure_part(name)}": loss for name, loss in losses.items()},
            **{
                f"loss_above_bsp_percent_{figure_part(name)}": 100 * (loss / losses[LOCKSTEP] - 1)
                for name, loss in losses.items()
                if name != LOCKSTEP
            },
        },
        rows=rows,
        machine=machine(batch_size=options.batch_size, width=options.width, layers=options.layers),
    )


def main() -> None:
    """Train as one worker; rank 0 sends the loss of the model that all workers have in the end."""
    settings = msgspec.convert(read_settings(sys.argv), LanguageSettings)
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    train, validation, vocabulary = read_windows(Path(settings.text), settings.tokens)
    model = Gpt(vocabulary=vocabulary, tokens=settings.tokens, width=settings.width, layers=settings.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, fused=True)
    with join(model, optimizer, parse_strategy(settings.strategy)) as session:
        for epoch in session.epochs(settings.epochs):
            for (windows,) in session.batches(TensorDataset(train), settings.batch_size):
                optimizer.zero_grad()
                loss = loss_of(model, windows)
                loss.backward()
                optimizer.step()
            if session.worker == 0:
                print_progress(f"epoch {epoch + 1} of {settings.epochs}, training loss {loss.item():.3f}")
    if session.worker == 0:
        with torch.no_grad():
            losses = [loss_of(model, part) * len(part) for part in validation.split(_EVALUATION_BATCH)]
        send_result(float(torch.stack(losses).sum()) / len(validation))


if __name__ == "__main__":
    main()
