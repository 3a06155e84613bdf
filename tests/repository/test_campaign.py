"""The campaign in short, and that it would notice: each verdict is given where it is due."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from campaign import verdict as v  # noqa: E402
from campaign.damage import Reference, judge  # noqa: E402
from campaign.forks import Ending  # noqa: E402
from campaign.hospitals import _judge as lied  # noqa: E402
from campaign.mutations import BYTES, NUMBERS, TEXT, TOML  # noqa: E402
from campaign.outcome import difference  # noqa: E402
from campaign.seal import sealed_again  # noqa: E402
from campaign.table import counts, document, of_parts  # noqa: E402
from campaign.targets import Target  # noqa: E402
from campaign.tensors import NPY, NPZ, SAFETENSORS  # noqa: E402

from fedsso.support.seal import BLANK, check, seal  # noqa: E402

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the campaign forks, and reads /proc"
)
PARTS = ("kills", "damage", "flips", "environment", "replies", "hospitals", "numbers")
# a slow machine is no fault: what hangs for ever is still found
ENV = os.environ | {"PYTHONWARNINGS": "ignore", "FEDSSO_CAMPAIGN_SECONDS": "600"}


# ---- the campaign itself ----


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a quick campaign."""
    out = tmp_path_factory.mktemp("campaign") / "found.json"
    command = [sys.executable, "-m", "campaign", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    assert done.returncode == bool(result["failures"])
    assert all(f"| {part} |" in done.stdout for part in PARTS)
    return result


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_the_library_stands(part: str, found: dict[str, Any]) -> None:
    assert [one for one in found["failures"] if one["part"] == part] == []
    counted = found["parts"][part]["counts"]
    assert counted["tried"] >= 8


# ---- that it would notice ----

CHILDREN = """
import json, os, time
from campaign.forks import forked
from fedsso.errors import InputError

def refuse():
    raise InputError("no: the value is 3, give 2")

works = {
    "fine": lambda: 5,
    "error": lambda: 1 / 0,
    "refusal": refuse,
    "hang": lambda: time.sleep(60),
    "memory": lambda: len(bytearray(3 << 30)),
    "death": lambda: os.kill(os.getpid(), 11),
}
ended = {name: forked(work, 2.0) for name, work in works.items()}
print(json.dumps({name: [*one, one.out_of_memory] for name, one in ended.items()}))
"""


@pytest.fixture(scope="module")
def ended() -> dict[str, Ending]:
    """How some processes ended, for different reasons."""
    command = [sys.executable, "-c", CHILDREN]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, check=True)
    return {name: Ending(*one[:-1]) for name, one in json.loads(done.stdout).items()}


FILE = Target("a file", "a", "a", lambda: None, "toml", guarded=True)
VERDICTS = {
    "error": v.TRACEBACK,
    "refusal": v.REFUSED,
    "hang": v.HANG,
    "memory": v.MEMORY,
    "death": v.TRACEBACK,
}


@pytest.mark.parametrize("name", VERDICTS)
def test_how_a_process_ended_is_judged(name: str, ended: dict[str, Ending]) -> None:
    assert judge(FILE, False, ended[name], Reference({}, ""))[0] == VERDICTS[name]


def test_what_a_process_returns_and_says_comes_back(ended: dict[str, Ending]) -> None:
    assert ended["fine"].value == 5
    assert ended["fine"].code == 0
    assert ended["refusal"].said == "no: the value is 3, give 2\n"


def used(value: str, said: str = "") -> Ending:
    return Ending(0, said, "", {"digest": value}, "", 0.1, 0, False)


@pytest.mark.parametrize(
    ("value", "said", "guarded", "forged", "verdict"),
    [
        ("a", "", True, False, v.RIGHT),
        ("a", "the one before is used\n", True, False, v.FELL_BACK),
        (
            "a",
            "round 7 of 9\n",
            True,
            False,
            v.RIGHT,
        ),  # said of the undamaged file as well, with other numbers
        ("b", "", True, False, v.WRONG),
        (
            "b",
            "the one before is used\n",
            True,
            False,
            v.WRONG,
        ),  # said, but the result must be exact
        ("b", "", True, True, v.TAKEN),
        ("b", "", False, False, v.TAKEN),
    ],
)
def test_what_was_used_is_compared(
    value: str, said: str, guarded: bool, forged: bool, verdict: str
) -> None:
    target = Target("a file", "a", "a", lambda: None, "toml", guarded=guarded)
    assert (
        judge(target, forged, used(value, said), Reference({"digest": "a"}, "round 3 of 9\n"))[0]
        == verdict
    )


def test_numbers_that_are_not_finite_are_wrong_whoever_says_them() -> None:
    ending = used("a")._replace(value={"digest": "b", "finite": False})
    target = Target("a table", "a", "a", lambda: None, "csv")
    assert judge(target, False, ending, Reference({"digest": "a"}, ""))[0] == v.WRONG


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, v.RIGHT),
        ({"excluded": True}, v.WRONG),  # left out, and yet it counts
        ({"sums": {"loglik": -2.0}}, v.TAKEN),
        ({"sums": {"loglik": -3.0}, "excluded": True}, v.REFUSED),
        ({"sums": {"loglik": float("nan")}}, v.WRONG),
    ],
)
def test_the_fit_beside_a_liar_is_compared(change: dict[str, Any], verdict: str) -> None:
    ending = used("a")._replace(value={"sums": {"loglik": -1.0}, "excluded": False, **change})
    assert lied(ending, {"loglik": -3.0}, {"loglik": -1.0})[0] == verdict
    assert lied(ending._replace(code=2), {}, {})[0] == v.LOST


def test_an_outcome_differs_by_a_file_a_number_or_a_run() -> None:
    good = {"files": ["a", "b"], "run . trace": [["1.0"], ["2.0"]]}
    assert difference(good, good) == ""
    assert difference({**good, "files": ["a"]}, good) == "missing: b"
    assert difference({"files": ["a", "b"]}, good) == "missing: run . trace"
    changed = {**good, "run . trace": [["1.0"], ["2.0000001"]]}
    assert "row 1" in difference(changed, good)


# ---- damage ----


def test_one_bit_is_one_bit() -> None:
    good = bytes(range(200))
    changed = BYTES["one bit"](good, random.Random(0))
    assert sum((a ^ b).bit_count() for a, b in zip(good, changed, strict=True)) == 1


def test_the_same_seed_makes_the_same_damage() -> None:
    good = b"a = 1\nb = 2.5\n\n[c]\nd = 'x'\n" * 5
    for change in (*BYTES.values(), *TEXT.values(), *TOML.values()):
        assert change(good, random.Random(3)) == change(good, random.Random(3))


def test_every_number_can_be_put_into_a_text() -> None:
    made = {TEXT["a number"](b"x = 1\n", random.Random(i)) for i in range(1000)}
    assert made == {b"x = " + number + b"\n" for number in NUMBERS}


def test_files_of_tensors_are_damaged_within_their_form(tmp_path: Path) -> None:
    import numpy as np
    import torch
    from safetensors.torch import save

    good = save(
        {"k": torch.tensor(3), "model": torch.randn(4), "errors.x": torch.zeros(2, 2)}, {"a": "b"}
    )
    np.savez(
        tmp_path / "part.npz",
        meta=np.frombuffer(b'[{"seed": 1, "label": "x"}]', np.uint8),
        loss=np.ones((1, 4)),
    )
    part = (tmp_path / "part.npz").read_bytes()
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(4, 3))
    for data, changes in (
        (good, SAFETENSORS),
        (part, {k: c for k, c in NPZ.items() if k != "bomb"}),
        ((tmp_path / "x.npy").read_bytes(), NPY),
    ):
        for seed in range(5):
            made = {name: change(data, random.Random(seed)) for name, change in changes.items()}
            assert sum(one != data for one in made.values()) > 0.8 * len(made)


def test_a_seal_is_made_anew() -> None:
    good = seal(f"rounds = 5\n# {BLANK}\n".encode())
    changed = good.replace(b"5\n", b"6\n", 1)
    assert check(changed) is False
    forged = sealed_again(good, changed)
    assert forged is not None
    assert check(forged) is True
    assert b"rounds = 6" in forged
    assert sealed_again(b"no seal", b"no seal either") is None


JUDGED = """
import json, shutil, sys, tempfile
from pathlib import Path
from campaign import damage, kills
from campaign.scenes import SCENES, from_tests
from campaign.targets import Target
from fedsso.regression.result import Regression

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
(folder / "tables").mkdir()
for name in ("a.csv", "b.csv"):
    (folder / "tables" / name).write_text("x\\n1\\n")

def read():
    found = [path.name for path in sorted(Path("tables").iterdir()) if path.is_file()]
    return {"digest": found}

target = Target("a table", "tables/a.csv", "tables", read, "csv")
known = damage.Reference({"digest": ["a.csv", "b.csv"]}, "")
kinds = ("a dangling link", "a folder", "nothing", "one bit")
passed = [damage._case(folder, 0, 0, target, kind, known).verdict for kind in kinds]

fits = from_tests("", "fits")
saved = [out / name for name in ("old", "new")]
for place in saved:
    Regression(fits.binomial(notes=(place.name,))).save(place)
old, new = (kills.read_outcome(place, None) for place in saved)
known = kills.Reference(new, 1, {}, 1.0, old)

def after_a_kill(**files):
    place = Path(tempfile.mkdtemp(dir=out))
    for name, one in files.items():
        name = {"model": "model.json", "summary": "summary.txt"}[name]
        shutil.copy(out / one / name, place / name)
    return bool(kills._torn(SCENES["glm over a model"], place, known))

torn = [
    after_a_kill(model="old", summary="old"),
    after_a_kill(model="new"),
    after_a_kill(model="new", summary="old"),
    after_a_kill(summary="old"),
]
print(json.dumps([passed, torn]))
"""


def test_a_link_that_hides_a_file_and_half_a_new_folder_are_failures(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A file that is not there cannot be missed; a dangling link in its place can."""
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("damage", "kills")]
    command = [sys.executable, "-c", JUDGED, *folders]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, check=True)
    passed, torn = json.loads(done.stdout)
    assert passed == [v.WRONG, v.WRONG, v.TAKEN, v.RIGHT]
    assert torn == [False, False, True, True]


# ---- faults ----

FULL = """
import errno, json, os, sys
from pathlib import Path
from campaign.faults import Files, fails_from
from campaign.forks import forked
from fedsso.support.files import write_atomic

def write(step):
    files = Files(Path(sys.argv[1]), fails_from(step, errno.ENOSPC)).install()
    write_atomic(Path(sys.argv[1]) / "a.txt", "text")
    return files.count

endings = [forked(lambda step=step: write(step)) for step in range(1, 20)]
print(json.dumps([[one.code, one.value, one.said] for one in endings]))
"""


def test_a_full_disk_is_felt_at_every_step(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, check=True)
    endings = json.loads(done.stdout)
    steps = next(value for _, value, _ in reversed(endings) if value is not None)
    codes = [code for code, _, _ in endings]
    assert 4 <= steps < 15  # open, write, fsync, replace, and what else it takes
    assert codes[:3] == [2, 2, 2]
    assert codes[steps:] == [0] * (len(codes) - steps)
    assert "No space left on device" in endings[0][2]
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


# ---- the table ----


def test_the_table_counts_every_verdict() -> None:
    results = [
        v.Result("kills", 0, "run", "x", v.RIGHT),
        v.Result("kills", 1, "run", "y", v.LOST, "gone"),
    ]
    found = document(results, {"seed": 0})
    assert counts(results)["tried"] == 2
    assert found["parts"]["kills"]["groups"]["run"]["lost"] == 1
    assert [one["name"] for one in found["failures"]] == ["y"]
    assert of_parts(found).splitlines()[2].startswith("| kills | 2 | 1 | 1 |")
