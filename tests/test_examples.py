"""The programs in `examples/` train under torchrun and resume; their lines are those that the docs quote."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import psutil
import pytest
from parameters_kit import in_full
from programs_kit import IMPORTED, WAIT_S, Script, printed_on, run_command, without_figures

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "guide" / "gradient-accumulation.md").read_text("utf-8")
PAIRS = [("gpt_text", "gpt_text_plain"), ("image_classifier", "image_classifier_plain")]
SCRIPTS = [script for pair in PAIRS for script in pair]
ON_TEXT = ["pretrain_text", "instruct_chats", "curriculum"]
SMALL = {
    # About five windows an epoch, so the end of one and the beginning of the next are among the steps.
    "gpt_text": ["--text", "README.md", "CHANGELOG.md", "--batch-size", "8", "--accumulate", "4"],
    "image_classifier": ["--batch-size", "24", "--accumulate", "2"],
}

EXACT = [
    pytest.param("choose_shuffle", "docs/guide/order.md", marks=pytest.mark.full),
    ("mix_datasets", "docs/guide/mixtures.md"),
    ("explain_step", "docs/guide/explain.md"),
    pytest.param("mixture_shares", "docs/guide/mixtures.md", marks=pytest.mark.full),
    ("tour", "docs/guide/tour.md"),
    pytest.param("text_to_rows", "docs/guide/text.md", marks=pytest.mark.full),
    pytest.param("preference_pairs", "docs/guide/text.md", marks=pytest.mark.full),
    ("batch_transform", "docs/guide/text.md"),
    pytest.param("images_from_tar", "docs/guide/images.md", marks=pytest.mark.full),
    pytest.param("several_images", "docs/guide/images.md", marks=pytest.mark.full),
    pytest.param("native_resolution", "docs/guide/images.md", marks=pytest.mark.full),
    pytest.param("labels_table", "docs/guide/images.md", marks=pytest.mark.full),
    pytest.param("clips", "docs/guide/media.md", marks=pytest.mark.full),
    pytest.param("convert_on_engine", "docs/guide/engines.md", marks=pytest.mark.full),
    ("hub_dataset", "docs/guide/hub.md"),
    pytest.param("gradient_windows", "docs/guide/gradient-accumulation.md", marks=pytest.mark.full),
    pytest.param("my_data", "docs/guide/benchmarking.md", marks=pytest.mark.full),
    pytest.param("remote_store", "docs/guide/storage.md", marks=pytest.mark.full),
    pytest.param("strategy_by_hand", "docs/reference/strategies.md", marks=pytest.mark.full),
    pytest.param("torch_loader", "docs/guide/workers.md", marks=pytest.mark.full),
    pytest.param("from_webdataset", "docs/guide/coming-from.md", marks=pytest.mark.full),
    pytest.param("convert", "docs/guide/convert.md", marks=pytest.mark.full),
    pytest.param("image_folder", "docs/guide/coming-from-formats.md", marks=pytest.mark.full),
]
"""Examples that need one process, and the pages that show what they print."""
NEEDS = {
    "from_webdataset": "cv2",
    "monitoring": "prometheus_client",
    "clips": "media_kit",
    "native_resolution": "cv2",
    "preference_pairs": "tokenizers",
    "text_to_rows": "tokenizers",
}
"""What some of them skip without."""
TIMED = [
    pytest.param("monitoring", "docs/guide/monitoring.md", "", marks=pytest.mark.full),
    pytest.param("small_container", "docs/guide/containers.md", r"\(.*\)$", marks=pytest.mark.full),
    pytest.param("starving", "docs/guide/profiling.md", "", marks=pytest.mark.full),
    pytest.param("strategies", "docs/guide/strategies.md", "", marks=pytest.mark.full),
    # Under load, processes may not have started before the second epoch has ended.
    pytest.param("workers", "docs/guide/workers.md", r"^default.*\n.*\n", marks=pytest.mark.full),
]
"""Those that print times or rates; what else may differ between two runs, as a pattern."""

IMPORTED_HERE = (*IMPORTED, "torch._dynamo", "torch.distributed.run", "torch.distributed.launcher.api")
"""What every rank would import anew; DDP needs torch._dynamo."""

# Runs a script as it is, then tells which threads of gloo are left.
THEN_THREADS = """
import os, runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
tasks = []
for task in os.listdir("/proc/self/task"):
    try:
        tasks.append(open(f"/proc/self/task/{task}/comm").read().strip())
    except OSError:
        pass  # a thread that has ended since it was listed
print("left:", *[task for task in tasks if "gloo" in task])
"""


TORCHRUN = """
import sys
from torch.distributed.run import main
main(["--standalone", "--nproc-per-node", "2", *sys.argv[1:]])
"""
# With torchrun's own agent too, but ranks that are forked and need not import torch.
FORKED_RANKS = """
import os, runpy, sys
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def run(*command):
    torch.set_num_threads(1)
    sys.argv[:] = command
    sys.path[:0] = [os.path.dirname(command[0]), *os.environ["PYTHONPATH"].split(os.pathsep)]
    runpy.run_path(command[0], run_name="__main__")

config = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="fork",
    run_id="whole", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
)
elastic_launch(config, run)(*sys.argv[1:])
"""


def launched(
    launcher: str, *command: str, folder: Path, cwd: Path = ROOT, ends_well: bool = True, **given: str
) -> str:
    """What a program prints in two ranks; all processes have ended after it.

    Args:
        launcher: a program that starts the ranks.
        command: the program of a rank, and its arguments.
        folder: for the launcher and the cache of catalogs.
        cwd: where the ranks run.
        ends_well: whether the launcher ends with 0.
        given: environment variables.
    """
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)]),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **given,
    }
    options = {
        "how": "forked",
        "folder": folder,
        "variables": variables,
        "cwd": cwd,
        "imported": IMPORTED_HERE,
    }
    with Script(launcher, *command, **options) as program:
        try:
            code, out, err = program.end()
        except BaseException:
            # Not the process group: torchrun gives each rank one of its own.
            for left in psutil.Process(program.process.pid).children(recursive=True):
                left.kill()
            raise
    assert (code == 0) == ends_well, out + err
    return out + err


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", printed, re.M)}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
@pytest.mark.parametrize("script", in_full(*SCRIPTS))
def test_an_example_learns_and_resumes_from_its_checkpoint_to_the_same_losses(
    script: str, tmp_path: Path
) -> None:
    """No thread of gloo outlives it: one that lets go of a tensor while Python ends would abort it."""
    program = [str(EXAMPLES / f"{script}.py"), "--out", str(tmp_path)]
    arguments = [*SMALL[script.removesuffix("_plain")], "--steps", "9", "--save-every", "7"]
    printed = launched(FORKED_RANKS, *program, *arguments, folder=tmp_path)
    whole = losses(printed)
    assert list(whole) == list(range(1, 10))
    assert whole[9] < 0.85 * whole[1]
    (tmp_path / "run.py").write_text(THEN_THREADS)
    program.insert(0, str(tmp_path / "run.py"))  # as if stopped after the checkpoint
    # Once a pair by torchrun itself: it and its ranks import torch, which takes longer than to train.
    launcher = FORKED_RANKS if script.endswith("_plain") else TORCHRUN
    printed = launched(launcher, *program, *arguments, folder=tmp_path)
    assert losses(printed) == {step: whole[step] for step in (8, 9)}
    assert len(re.findall(r"left:", printed)) == 2
    assert "gloo" not in printed


@pytest.mark.parametrize("script", in_full(*ON_TEXT))
def test_an_example_on_text_resumes_on_another_number_of_ranks_to_the_same_losses(
    script: str, tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers")
    program = [str(EXAMPLES / f"{script}.py"), "--out", str(tmp_path), "--steps", "9", "--save-every", "7"]
    program += ["--measure-every", "3"] if script == "curriculum" else []
    whole = losses(launched(FORKED_RANKS, *program, folder=tmp_path))
    assert list(whole) == list(range(1, 10))
    assert whole[9] < 0.9 * whole[1]
    launcher = FORKED_RANKS.replace("nproc_per_node=2", "nproc_per_node=3")
    resumed = losses(launched(launcher, *program, folder=tmp_path))  # as if stopped after the checkpoint
    assert resumed == {step: pytest.approx(whole[step], rel=1e-4) for step in (8, 9)}


@pytest.mark.full
def test_a_training_that_is_killed_goes_on_with_other_ranks_as_its_page_shows(tmp_path: Path) -> None:
    program = str(EXAMPLES / "elastic_training.py")
    killed = launched(FORKED_RANKS, program, folder=tmp_path, cwd=tmp_path, ends_well=False, KILL_AT="12")
    launcher = FORKED_RANKS.replace("nproc_per_node=2", "nproc_per_node=3")
    resumed = losses(launched(launcher, program, folder=tmp_path, cwd=tmp_path))
    assert list(resumed) == list(range(11, 21))
    assert {step: resumed[step] for step in (11, 12)} == pytest.approx(
        {step: losses(killed)[step] for step in (11, 12)}, abs=2e-4
    )
    shown = losses(printed_on("docs/guide/ranks.md", "elastic_training"))
    assert shown == {step: pytest.approx((losses(killed) | resumed)[step], abs=2e-3) for step in shown}


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_evaluation_is_exact_on_any_number_of_ranks_as_its_page_shows(ranks: int, tmp_path: Path) -> None:
    launcher = FORKED_RANKS.replace("nproc_per_node=2", f"nproc_per_node={ranks}")
    printed = launched(launcher, str(EXAMPLES / "exact_evaluation.py"), folder=tmp_path, cwd=tmp_path)
    assert printed_on("docs/guide/evaluation.md", "exact_evaluation") in printed
    assert len((tmp_path / "out" / "evaluation" / "predictions.txt").read_text().split()) == 1_003


@pytest.mark.full
def test_ranks_of_a_group_get_the_same_batches_as_their_page_shows(tmp_path: Path) -> None:
    launcher = FORKED_RANKS.replace("nproc_per_node=2", "nproc_per_node=4")
    printed = launched(launcher, str(EXAMPLES / "replica_groups.py"), folder=tmp_path, cwd=tmp_path)
    assert printed_on("docs/guide/ranks.md", "replica_groups") in printed


@pytest.mark.full
def test_megatrons_groups_get_the_same_batches(tmp_path: Path) -> None:
    launcher = FORKED_RANKS.replace("nproc_per_node=2", "nproc_per_node=8")
    printed = launched(launcher, str(EXAMPLES / "megatron_groups.py"), folder=tmp_path, cwd=tmp_path)
    lines = [line.partition(": samples ") for line in printed.splitlines() if line.startswith("rank ")]
    assert [samples for _, _, samples in lines] == 2 * [*2 * ["[0, 1, 2, 3]"], *2 * ["[4, 5, 6, 7]"]]
    assert lines[6][0] == "rank 6, stage 1, part 0"


@pytest.mark.full
def test_a_distributed_checkpoint_of_two_ranks_goes_on_with_three(tmp_path: Path) -> None:
    """As a training of two that was not stopped."""

    def run(folder: Path, ranks: int, steps: int) -> dict[int, float]:
        folder.mkdir(exist_ok=True)
        launcher = FORKED_RANKS.replace("nproc_per_node=2", f"nproc_per_node={ranks}")
        program = str(EXAMPLES / "distributed_checkpoint.py")
        return losses(launched(launcher, program, folder=folder, cwd=folder, STOP=str(steps)))

    whole = run(tmp_path / "whole", 2, 8)
    first, rest = run(tmp_path / "parts", 2, 5), run(tmp_path / "parts", 3, 8)
    assert first | rest == pytest.approx(whole, abs=2e-4)
    assert (list(first), list(rest)) == ([*range(1, 6)], [*range(6, 9)])


@pytest.mark.full
@pytest.mark.timeout(400)
def test_packed_rows_compiled_print_what_their_page_shows(tmp_path: Path) -> None:
    cache = str(tmp_path / "inductor")
    printed = alone("packed_rows", tmp_path, seconds=300, TORCHINDUCTOR_CACHE_DIR=cache).splitlines()
    shown = printed_on("docs/guide/batching.md", "packed_rows").splitlines()
    assert [line.partition("loss")[0] for line in [*printed[:3], printed[-1]]] == [
        line.partition("loss")[0] for line in shown
    ]
    assert all(4 < float(line.split()[-1]) < 5 for line in printed[:-1])  # about log(64), that of chance


@pytest.mark.full
def test_packed_documents_have_the_loss_of_each_document_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    printed = alone("packed_transformers", tmp_path, seconds=110).splitlines()
    shown = printed_on("docs/guide/batching.md", "packed_transformers").splitlines()
    figures = [float(line.split()[-1]) for line in printed]
    assert [float(line.split()[-1]) for line in shown] == pytest.approx(figures[:2], abs=2e-3)
    assert figures[0] == pytest.approx(figures[1], abs=2e-4)
    assert figures[-1] < 0.5 * figures[1]


@pytest.mark.full
def test_fsdp2_goes_on_from_its_states_over_the_same_windows(tmp_path: Path) -> None:
    printed = launched(FORKED_RANKS, str(EXAMPLES / "fsdp2.py"), folder=tmp_path, cwd=tmp_path)
    steps = re.findall(r"^step (\d+): (\d+) tokens, gradient \d\.\d{4}$", printed, re.M)
    assert [int(step) for step, _ in steps] == list(range(1, 9))  # stopped and resumed after the fourth
    texts = [json.loads(line)["tokens"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert sum(int(tokens) for _, tokens in steps) == sum(len(text) - 1 for text in texts)


def test_forms_of_the_loop_over_windows_end_with_the_same_weights(tmp_path: Path) -> None:
    assert alone("gradient_forms", tmp_path).endswith("with blocks: step 3\nthe same weights\n")


@pytest.mark.full
def test_the_doctor_says_of_a_starving_training_what_its_page_shows() -> None:
    page = (ROOT / "docs" / "guide" / "profiling.md").read_text("utf-8")
    shown = page.partition("Of the first run above it says:\n\n```text\n")[2].partition("```")[0]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "dataflow.tools.cli",
            "doctor",
            "--",
            sys.executable,
            EXAMPLES / "starving.py",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=True,
    )
    told = {without_figures(line.strip()) for line in done.stdout.splitlines()}
    assert {without_figures(line.strip()) for line in shown.splitlines()} <= told


def test_a_plan_is_the_one_that_its_page_shows() -> None:
    page = (ROOT / "docs" / "guide" / "benchmarking.md").read_text("utf-8")
    command, _, rest = page.partition("\ndataflow plan ")[2].partition("\n")
    shown = rest.partition("```text\n")[2].partition("```")[0]
    code, printed = run_command("plan", *command.split())
    assert code == 0
    assert {" ".join(line.split()) for line in shown.splitlines()} <= set(printed.splitlines())


def alone(script: str, folder: Path, *, seconds: float = WAIT_S, **given: str) -> str:
    """What an example prints that needs one process, in an empty folder, with environment variables given."""
    options = {
        "how": "forked",
        "folder": folder,
        "cwd": folder,
        "variables": {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)]),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            **given,
        },
        "imported": IMPORTED_HERE,
    }
    beside = f"import sys; sys.path.append({str(EXAMPLES)!r})\n"  # where modules of the examples are
    with Script(beside + (EXAMPLES / f"{script}.py").read_text("utf-8"), **options) as program:
        code, out, err = program.end(seconds)
    assert code == 0, out + err
    return out


@pytest.mark.parametrize(("script", "page"), EXACT)
def test_an_example_prints_what_its_page_shows(script: str, page: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(script, "dataflow"))
    assert alone(script, tmp_path) == printed_on(page, script)


@pytest.mark.parametrize(("script", "page", "changing"), TIMED)
def test_an_example_prints_what_its_page_shows_but_for_times(
    script: str, page: str, changing: str, tmp_path: Path
) -> None:
    printed, shown = alone(script, tmp_path), printed_on(page, script)
    for pattern in filter(None, [changing]):
        printed, shown = (re.sub(pattern, "", text, flags=re.MULTILINE) for text in (printed, shown))
    assert without_figures(printed) == without_figures(shown)


@pytest.mark.full
def test_the_script_with_webdataset_learns_what_the_one_without_does(tmp_path: Path) -> None:
    for package in ("webdataset", "PIL", "cv2"):
        pytest.importorskip(package)
    before, after = (alone(script, tmp_path) for script in ("from_webdataset_plain", "from_webdataset"))
    for printed in (before, after):
        first, second = map(float, re.findall(r"^epoch \d: .*mean loss (\S+)$", printed, re.M))
        assert second < min(first, 1.3)  # chance is log(4), about 1.39


def test_the_script_that_streamed_from_the_hub_sees_every_sample_of_both_epochs(tmp_path: Path) -> None:
    epochs = [f"epoch {epoch}: 320 samples, 160 positive" for epoch in range(2)]
    assert alone("from_hf_streaming", tmp_path).splitlines() == epochs


def test_rows_of_a_csv_file_become_shards(tmp_path: Path) -> None:
    assert alone("csv_to_shards", tmp_path).startswith("250 rows, {'text': ['review ")


def code_lines(path: Path) -> int:
    """Lines with code: neither blank, nor only a comment, nor of a docstring."""
    text = path.read_text("utf-8")
    lines: set[int] = set()
    begins_statement = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            begins_statement = True
        elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            if not (begins_statement and token.type == tokenize.STRING):
                lines.update(range(token.start[0], token.end[0] + 1))
            begins_statement = False
    return len(lines)


def test_the_lines_in_the_docs_are_those_of_the_programs() -> None:
    rows = re.findall(r"^\| .*\| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    counted = [(code_lines(EXAMPLES / f"{a}.py"), code_lines(EXAMPLES / f"{b}.py")) for a, b in PAIRS]
    assert [(int(ours), int(plain)) for ours, plain in rows] == counted


def test_every_command_in_the_docs_runs_an_example_that_exists() -> None:
    named = re.findall(r"examples/(\w+)\.py", PAGE)
    assert set(named) >= {*SCRIPTS, "models", "sample_data"}
    assert [name for name in named if not (EXAMPLES / f"{name}.py").exists()] == []


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    text = '"""One\ntwo."""\n\n# note\nx = """a\nb"""  # c\ndef f():\n    """Doc."""\n'
    path.write_text(text + "    return (\n        1\n    )\n")
    assert code_lines(path) == 6
