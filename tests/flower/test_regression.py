"""A regression over Flower's grid: what travels, what is refused, and who is asked."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import clinics
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.common.serde import message_to_proto
from grid import NODES, LocalGrid

from fedsso.errors import InputError
from fedsso.flower.regression import own, records, server
from fedsso.flower.regression.client import hospital_app
from fedsso.flower.regression.server import Nodes
from fedsso.regression.limits import Limits
from fedsso.regression.questions import ASSESS, DESCRIBE, SCORE, Answer, Question, Refusal, Wrong

NAMES = tuple(clinics.ORDERS)
QUESTION = Question(
    SCORE, clinics.SCHEMA, "binomial", np.array([0.1, -2.5]), np.zeros(2), np.ones(2)
)


class Echo:
    """A hospital that answers with the model, a number, and its row of twos."""

    def __init__(self, name: str, fails: Exception | None = None) -> None:
        self.name = name
        self.fails = fails

    def answer(self, question: Question) -> Answer:
        if self.fails:
            raise self.fails
        return Answer(self.name, {"model": question.model, "rows": np.array([2.0])})


def echoes(
    *hospitals: Echo, tamper: Callable[[Message], Any] | None = None
) -> tuple[Nodes, LocalGrid]:
    """Hospitals in this process, asked over a wire of real bytes."""

    def find(context: Context) -> Echo:
        return hospitals[int(context.node_config["partition-id"])]

    configs = [{"partition-id": i} for i in range(len(hospitals))]
    grid = LocalGrid(hospital_app(find), configs, tamper, in_order=True)
    return Nodes(grid, least=len(hospitals), timeout=1.0), grid


def names(answers: Sequence[Answer | Refusal]) -> list[str]:
    return [one.hospital for one in answers]


# ---- questions and answers ----


def test_a_question_arrives_as_it_was_asked() -> None:
    got = records.question_of(records.asked(QUESTION))
    assert got[:3] == QUESTION[:3]
    for mine, other in zip(got[3:], QUESTION[3:], strict=True):
        assert np.array_equal(mine, other)
        assert mine.dtype == np.float64


def test_all_hospitals_answer_and_messages_are_counted() -> None:
    nodes, grid = echoes(Echo("a"), Echo("b"), Echo("c"))
    for step in range(2):
        question = QUESTION._replace(model=QUESTION.model + step)
        answers = nodes(question)
        assert names(answers) == ["a", "b", "c"]
        assert all(np.array_equal(one.arrays["model"], question.model) for one in answers)
    nodes(QUESTION._replace(name=ASSESS))
    assert nodes.asked == {SCORE: 2, ASSESS: 1}
    assert nodes.messages == len(grid.sent) == 9


def test_a_message_that_is_no_question_is_refused() -> None:
    nodes, grid = echoes(Echo("a"))
    (reply,) = grid.send_and_receive([Message(RecordDict(), grid.get_node_ids()[0], "query")])
    assert "server and hospital need the same app" in reply.error.reason
    assert isinstance(nodes(QUESTION._replace(name="rows"))[0], Refusal)


def test_two_hospitals_of_one_name_stay_apart_and_none_can_change_its_name() -> None:
    changing = Echo("b")
    nodes, grid = echoes(Echo("a"), Echo("a"), changing)
    first, second, _ = (f"a (node {node})" for node in grid.get_node_ids())
    assert names(nodes(QUESTION)) == [first, second, "b"]
    changing.name = "a"
    assert names(nodes(QUESTION)) == [first, second, "b"]


def test_a_name_with_anothers_node_stays_apart_as_well() -> None:
    first, second, third = sorted(NODES[:3])
    false = f"a (node {first})"
    nodes, _ = echoes(Echo("a"), Echo("a"), Echo(false))
    assert names(nodes(QUESTION)) == [
        f"{false} (node {first})",
        f"a (node {second})",
        f"{false} (node {third})",
    ]


def test_a_name_cannot_forge_lines_of_the_log() -> None:
    nodes, _ = echoes(Echo("a\nWARNING: b"), Echo("x" * 5000))
    first, second = names(nodes(QUESTION))
    assert first == "a WARNING: b"
    assert len(second) < 300


# ---- refusals ----


def test_a_refusal_tells_its_public_part_alone(caplog: pytest.LogCaptureFixture) -> None:
    why = InputError(f"line 7: {clinics.SECRET}", public="column 'age': 2 cells are not numbers")
    nodes, grid = echoes(Echo("a"), Echo("b", why))
    arrived: list[Message] = []
    grid.tamper = lambda reply: arrived.append(reply) or reply
    with caplog.at_level(logging.INFO, "flwr"):
        answers = nodes(QUESTION)
    assert answers[1] == Refusal("b", "column 'age': 2 cells are not numbers")
    sent = b"".join(message_to_proto(reply).SerializeToString() for reply in arrived)
    assert b"2 cells are not numbers" in sent
    assert b"Miller" not in sent
    assert clinics.SECRET in caplog.text  # the hospital's own log has it, in this one process


def test_who_refuses_the_first_question_takes_no_part() -> None:
    nodes, grid = echoes(Echo("a"), Echo("b", InputError("no", public="no")))
    first, second = nodes(QUESTION._replace(name=DESCRIBE)), nodes(QUESTION)
    assert first[1] == second[1] == Refusal("b", "no")
    assert nodes.messages == len(grid.sent) == 3


def test_who_does_not_answer_is_asked_once_more_and_the_others_are_not() -> None:
    forgetful = Echo("b")
    nodes, grid = echoes(Echo("a"), forgetful)
    forgetful.fails = InputError("busy", public="busy")
    assert nodes(QUESTION)[1] == Refusal("b", "busy")
    forgetful.fails = None
    assert names(nodes(QUESTION)) == ["a", "b"]
    assert all(isinstance(one, Answer) for one in nodes(QUESTION))
    assert nodes.messages == len(grid.sent) == 3  # two, and one for who had not answered
    forgetful.fails = InputError("gone", public="gone")
    for step in range(1, 5):
        answers = nodes(QUESTION._replace(model=QUESTION.model + step))
        assert answers[1] == Refusal("b", "gone")
    assert nodes.messages == len(grid.sent) == 3 + 4 + 2  # the second failure was the last


@pytest.mark.parametrize("lost", ["silence", "an error"])
def test_who_is_lost_at_the_first_question_is_asked_once_more(lost: str) -> None:
    """A busy machine withdraws the token of a process that starts too late: the message is lost."""
    nodes, grid = echoes(Echo("a"), Echo("b"))
    node = grid.get_node_ids()[1]
    replies = iter([lost])

    def lose(reply: Message) -> Message | None:
        if reply.metadata.src_node_id != node or not next(replies, ""):
            return reply
        return None if lost == "silence" else Message(Error(1, "node left"), reply_to=grid.asked)

    grid.tamper = lose
    answers = nodes(QUESTION._replace(name=DESCRIBE))
    assert [type(one) for one in answers] == [Answer, Answer]
    assert nodes.messages == len(grid.sent) == 3
    grid.tamper = lambda reply: reply if reply.metadata.src_node_id != node else None
    assert nodes(QUESTION._replace(name=DESCRIBE, schema="other"))[1] == Refusal(
        "b", "no answer within 1 s"
    )
    assert nodes.messages == 3 + 2 + 1  # twice the other, and then it is gone
    assert len(nodes(QUESTION)) == 2
    assert nodes.messages == 6 + 1


def test_who_is_lost_is_waited_for_until_it_is_online_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, grid = echoes(Echo("a"), Echo("b"))
    every = grid.get_node_ids()
    online = iter([every, every[:1], every[:1]])
    seen: list[int] = []

    def look() -> list[int]:
        found = next(online, every)
        seen.append(len(found))
        return found

    monkeypatch.setattr(grid, "get_node_ids", look)
    monkeypatch.setattr(server, "PAUSE", 0.0)
    nodes.timeout = 60.0
    grid.tamper = lambda reply: reply if seen == [2, 1, 1, 2] else None
    answers = nodes(QUESTION._replace(name=DESCRIBE))
    assert [type(one) for one in answers] == [Answer, Answer]


@pytest.mark.parametrize("error", [ValueError(clinics.SECRET), KeyError(clinics.SECRET)])
def test_any_other_error_tells_its_kind_alone(error: Exception) -> None:
    nodes, grid = echoes(Echo("a", error))
    (refusal,) = nodes(QUESTION)
    assert isinstance(refusal, Refusal)
    assert type(error).__name__ in refusal.reason
    assert "Miller" not in refusal.reason
    assert refusal.hospital == f"node {grid.get_node_ids()[0]}"


def with_rows(value: Array | str | None) -> Callable[[Message], Message]:
    """Puts another array into a reply, or takes all of them, or everything."""

    def tamper(reply: Message) -> Message:
        if value == "empty":
            reply.__dict__["_content"] = None
            return reply
        arrays = dict(reply.content.array_records[records.NUMBERS])
        if value is None:
            del reply.content[records.NUMBERS]
        else:
            reply.content[records.NUMBERS] = ArrayRecord({**arrays, "rows": value})
        return reply

    return tamper


def cut() -> Array:
    whole = Array(np.ones(1000))
    whole.data = whole.data[:200]
    return whole


UNREADABLE = {
    "cut off": (cut(), "its rows cannot be read"),
    "no array": (Array("float64", (1,), "numpy.ndarray", b"rows"), "its rows cannot be read"),
    "no arrays": (None, "no answer of a hospital"),
    "an empty message": ("empty", "no answer of a hospital"),
}


@pytest.mark.parametrize(("value", "reason"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_answer_that_cannot_be_read_is_a_refusal_for_good(
    value: Array | str | None, reason: str
) -> None:
    nodes, grid = echoes(Echo("a"), tamper=with_rows(value))
    for step in range(2):
        (refusal,) = nodes(QUESTION._replace(model=QUESTION.model + step))
        assert isinstance(refusal, Wrong)
        assert reason in refusal.reason
    assert len(grid.sent) == 1


def test_a_lost_answer_and_a_foreign_one() -> None:
    nodes, grid = echoes(Echo("a"), Echo("b"))
    lost = grid.get_node_ids()[1]
    grid.tamper = lambda reply: None if reply.metadata.src_node_id == lost else [reply, reply]
    answers = nodes(QUESTION)
    assert isinstance(answers[0], Answer)
    assert answers[1] == Refusal(f"node {lost}", "no answer within 1 s")


def test_it_waits_for_the_hospitals_and_says_how_many_came() -> None:
    nodes, _ = echoes(Echo("a"))
    nodes.least, nodes.timeout = 3, 0.0
    with pytest.raises(InputError, match="1 of 3 hospitals were online"):
        nodes(QUESTION)


# ---- what a hospital has set for itself ----


def context(folder: Path, **config: Any) -> Context:
    told = {key.replace("_", "-"): value for key, value in config.items()}
    server = {"data-folder": "/etc", "min-rows": 1, "name": "server's", "files": "/etc"}
    return Context(1, 5, {"data-folder": str(folder), **told}, RecordDict(), server)


def test_a_hospitals_limits_are_its_own(tmp_path: Path) -> None:
    assert own.hospital(context(tmp_path)).limits == Limits()
    (tmp_path / "hospital.toml").write_text(
        'name = "north"\n[limits]\nmin-rows = 50\nmax-share = 0.1\n'
    )
    found = own.hospital(context(tmp_path))
    assert (found.name, found.limits) == ("north", Limits(min_rows=50, max_share=0.1))
    found = own.hospital(context(tmp_path, min_rows=70, min_events=9, name="N"))
    assert (found.name, found.limits) == ("N", Limits(min_rows=70, min_events=9, max_share=0.1))


WRONG = {
    "a limit that does not exist": ("[limits]\nmin_row = 50", "unknown limit 'min_row'"),
    "a limit outside its section": ("min-rows = 50", "unknown setting of hospital.toml 'min-rows'"),
    "no number": ('[limits]\nmin-rows = "50"', "min-rows must be an integer"),
    "no share": ("[limits]\nmax-share = 2", "max-share must be above 0 and at most 1"),
    "no section": ("limits = 5", "must be a section [limits]"),
    "no TOML": ("limits", "cannot read"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_a_setting_that_is_not_understood_is_no_default(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "hospital.toml").write_text(text)
    with pytest.raises(InputError) as caught:
        own.hospital(context(tmp_path))
    assert message in str(caught.value)


def test_a_node_needs_a_folder_with_one_table(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not know the hospital's folder"):
        own.hospital(Context(1, 5, {}, RecordDict(), {"data-folder": str(tmp_path)}))
    with pytest.raises(InputError, match="has 0 files") as caught:
        own.hospital(context(tmp_path)).table()
    assert str(tmp_path) not in caught.value.public
    clinics.write(tmp_path)
    with pytest.raises(InputError, match="has 4 files"):
        own.hospital(context(tmp_path)).table()


def clinic(folder: Path, name: str, settings: str = "", bad: str = "") -> dict[str, Any]:
    """The node config of a clinic with a folder of its own."""
    clinics.write(folder / "all", bad)
    (folder / name).mkdir()
    (folder / "all" / f"{name}.csv").rename(folder / name / "table.csv")
    (folder / name / "hospital.toml").write_text(settings)
    return {"data-folder": str(folder / name), "name": name}


def described(
    config: dict[str, Any], schema: str = clinics.SCHEMA, family: str = "binomial"
) -> Answer | Refusal:
    """The answer of a clinic to the first question."""
    nodes = Nodes(LocalGrid(hospital_app(own.hospital), [config]), least=1)
    nothing = np.zeros(0)
    (found,) = nodes(Question(DESCRIBE, schema, family, nothing, nothing, nothing))
    return found


def test_a_hospital_answers_for_the_schema_that_it_agreed_to(tmp_path: Path) -> None:
    config = clinic(tmp_path, "east", 'schema = "agreed.toml"')
    (tmp_path / "east" / "agreed.toml").write_text(clinics.SCHEMA)
    assert isinstance(described(config, f"# a comment\n{clinics.SCHEMA}"), Answer)
    other = clinics.SCHEMA.replace('levels = ["I", "II", "III"]', 'levels = ["I", "II"]')
    assert described(config, other) == Refusal(
        "east", "this hospital answers for another schema, the one that it has agreed to"
    )


PINNED = {
    "the schema's usual one": ('schema = "agreed.toml"', False),
    "its own": ('schema = "agreed.toml"\nfamily = "gaussian"', True),
    "another": ('schema = "agreed.toml"\nfamily = "poisson"', False),
    "another for any schema": ('family = "poisson"', False),
    "none": ("", True),
}


@pytest.mark.parametrize(("settings", "answers"), PINNED.values(), ids=PINNED)
def test_a_hospital_answers_for_the_family_that_it_agreed_to(
    tmp_path: Path, settings: str, answers: bool
) -> None:
    config = clinic(tmp_path, "east", settings)
    schema = 'outcome = "age"\n[columns.smoker]\ntype = "yesno"\n'
    (tmp_path / "east" / "agreed.toml").write_text(schema)
    found = described(config, schema, "gaussian")
    assert isinstance(found, Answer) == answers
    assert answers or "answers for another family" in str(found)


def test_a_hospital_remembers_its_answers_in_a_file(tmp_path: Path) -> None:
    """Every message comes to a new process there. Six rows have no stage, so that two schemas
    differ by six rows; a table without its first row differs by one."""
    config = clinic(tmp_path, "east", "[limits]\nmin-rows = 6\nmax-share = 1.0")
    path = Path(config["data-folder"]) / "table.csv"
    fewer = clinics.SCHEMA.replace('type = "category"', 'type = "ignore"')
    assert isinstance(described(config), Answer)
    assert isinstance(described(config, fewer), Answer)
    kept = (path.parent / own.LEDGER).read_bytes()
    assert isinstance(described(config), Answer)
    assert (path.parent / own.LEDGER).read_bytes() == kept
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *rows[1:]]))
    found = described(config)
    assert isinstance(found, Refusal)
    assert "tell about fewer than 6 rows" in found.reason
    (path.parent / own.LEDGER).write_bytes(kept[:50])
    assert isinstance(described(config), Refusal)  # what cannot be read may have been answered
    (path.parent / own.LEDGER).unlink()
    assert isinstance(described(config), Answer)


@pytest.mark.parametrize(
    "limit", ["min-rows = 91", "min-events = 80", "min-level = 60", "max-share = 0.01"]
)
def test_a_hospital_refuses_by_its_own_limits(tmp_path: Path, limit: str) -> None:
    found = described(clinic(tmp_path, "east", f"[limits]\n{limit}"))
    assert isinstance(found, Refusal)
    assert "this hospital's limit" in found.reason


def test_weights_cannot_single_out_rows(tmp_path: Path) -> None:
    """A server could else name a column of zeros and ones as weights, and ask for a few rows."""
    config = clinic(tmp_path, "east")
    path = Path(config["data-folder"]) / "table.csv"
    header, *rows = path.read_text().splitlines()
    counted = [f"{row},{int(i < 5)}" for i, row in enumerate(rows)]
    path.write_text("\n".join([f"{header},few", *counted]))
    found = described(config, f'weights = "few"\n{clinics.SCHEMA}')
    assert isinstance(found, Refusal)
    assert "not weights above 0" in found.reason


def test_a_bad_cell_is_told_by_column_and_count(tmp_path: Path) -> None:
    found = described(clinic(tmp_path, "west", bad=clinics.SECRET))
    assert isinstance(found, Refusal)
    assert found.hospital == "west"
    assert "'age'" in found.reason
    assert "2" in found.reason
    assert "Miller" not in found.reason


def test_a_column_more_is_told_in_the_hospitals_own_log_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        found = described(clinic(tmp_path, "south"))
    assert isinstance(found, Answer)
    assert "doctor" in caplog.text
    assert "doctor" not in str(found)


ONE_QUESTION = """
import sys
import numpy as np
from flwr.app import Message
from grid import LocalGrid
from fedsso.flower.regression import own, records
from fedsso.flower.regression.client import hospital_app
from fedsso.regression.questions import QUESTIONS, Question
grid = LocalGrid(hospital_app(own.hospital), [{"data-folder": sys.argv[1]}])
schema = open(sys.argv[1] + "/schema.toml").read()
for name in QUESTIONS:
    p = 0 if name == "describe" else 5
    question = Question(name, schema, "binomial", np.zeros(p), np.zeros(p), np.ones(p))
    (reply,) = grid.send_and_receive(
        [Message(records.asked(question), grid.get_node_ids()[0], "query")]
    )
    print(name, len(reply.content.array_records["numbers"]) > 0)
print([name for name in ("torch", "pandas", "scipy", "sklearn", "ray") if name in sys.modules])
"""


def test_a_hospital_loads_numpy_and_flower_alone(tmp_path: Path) -> None:
    config = clinic(tmp_path, "east")
    (tmp_path / "east" / "schema.toml").write_text(clinics.SCHEMA)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ONE_QUESTION, config["data-folder"]],
        capture_output=True,
        text=True,
        env=os.environ
        | {"PYTHONPATH": path, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    answers = ["describe True", "score True", "information True", "assess True"]
    assert done.stdout.splitlines() == [*answers, "[]"]
