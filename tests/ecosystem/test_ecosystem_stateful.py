"""Call sites of torchdata's StatefulDataLoader with this package's loader, by another import."""

from __future__ import annotations

import runpy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from programs_kit import ROOT

stateful = pytest.importorskip("torchdata.stateful_dataloader")

EXAMPLE = ROOT / "examples" / "stateful_dataloader.py"
OURS, THEIRS = "from dataflow import DataLoader as", "from torchdata.stateful_dataloader import"

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_program_resumes_with_either_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shuffle is torch's, which torchdata's is not: each sample comes once with both."""
    text = EXAMPLE.read_text()
    assert OURS in text
    monkeypatch.syspath_prepend(str(tmp_path))  # for its workers
    for name, program in {"with_ours": text, "with_theirs": text.replace(OURS, THEIRS)}.items():
        (tmp_path / f"{name}.py").write_text(program)
        ran: dict[str, Any] = runpy.run_path(str(tmp_path / f"{name}.py"), run_name="__main__")
        assert capsys.readouterr().out.startswith("3 batches, then 7: ")
        assert sorted(chain(*ran["first"], *ran["rest"])) == [*range(40)]
        assert ran["before"].__class__.__module__.startswith(
            "dataflow" if name == "with_ours" else "torchdata"
        )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_of_every_batch_resumes_as_torchdata_does(workers: int) -> None:
    def states_and_rests(cls: Any) -> list[list[list[int]]]:
        rests = []
        for cut in (0, 1, 3, 5):
            loader = cls(range(22), 4, num_workers=workers)
            loop = iter(loader)
            head = [next(loop).tolist() for _ in range(cut)]
            again = cls(range(22), 4, num_workers=workers)
            again.load_state_dict(loader.state_dict())
            rests.append(head + [batch.tolist() for batch in again])
        return rests

    from dataflow import DataLoader

    assert states_and_rests(DataLoader) == states_and_rests(stateful.StatefulDataLoader)
