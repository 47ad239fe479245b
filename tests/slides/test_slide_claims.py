"""What the decks say about the worked examples is true.

Each claim is a sentence of a slide or of its notes, and an expression on the recorded runs, which
`test_slides.py` runs again. What a run does not show is computed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from common import EngineConfig
from m3_paged.admission import Admission
from m4_radix import scheduler as m4_scheduler
from m4_radix.kv_cache import KVCacheManager
from m4_radix.policy import MAX_OVERTAKING, SchedulePolicy
from m5_overlap.cuda_graph import graph_sizes
from milestones.course import catalog
from milestones.course.testing.runner import Runner
from milestones.staff.maintain import ladder_runs, mutants
from slides import inputs
from slides.facts import recorded
from slides.figures import forwards_of
from tests.conftest import ROOT, build_engine, shared_model
from tests.exercises.by_hand import make_request, scheduled
from tests.exercises.paged_states import make_scheduler
from tests.exercises.test_m2_2 import make_scheduler as m2_scheduler
from tests.helpers.oracle import greedy

Json = dict[str, Any]


M1, M2, M3, M4, M5 = (recorded(f"m{n}_example") for n in range(1, 6))
RETRACT, FUTURES, SPLIT, MAP, SCORES = (
    recorded(name) for name in ("m3_retract", "m5_futures", "m4_split", "m3_map", "m3_scores")
)


def batch(run: Json, number: int) -> dict[str, int]:
    """Return the tokens of each request in step (m5: forward) `number`."""
    return forwards_of(run)[number - 1]


def first_token(run: Json, who: str) -> int:
    return next(n for n, step in enumerate(run["steps"], 1) if who in step["said"])


def table(run: Json, step: int, who: str) -> list[int]:
    pages: list[int] = run["steps"][step - 1]["tables"][who]
    return pages


def slots(run: Json, step: int, who: str, positions: range) -> list[int]:
    size, pages = run["config"]["page_size"], table(run, step, who)
    return [pages[p // size] * size + p % size for p in positions]


def owner(run: Json, step: int, page: int) -> str | None:
    found: str | None = run["steps"][step - 1]["pages"].get(str(page))
    return found


def nodes(run: Json, step: int) -> dict[str, list[int]]:
    return {n["text"].strip(): n["pages"] for n in run["steps"][step - 1]["nodes"].values()}


def computed(run: Json, who: str) -> int:
    return sum(batch.get(who, 0) for batch in forwards_of(run))


def single(run: Json) -> int:
    return sum(sum(batch.values()) == 1 for batch in forwards_of(run))


Claims = list[tuple[str, Callable[[], Any]]]
OPENING: Claims = [
    ("1 = 14**: the fifth output token", lambda: computed(M1, "A") == 14),
    ("10 + 11 + 12 + 13 + 14 = 60", lambda: sum(range(10, 15)) == 60),
    ('<div class="number">46,080</div>', lambda: kv_bytes() == 46_080),
    ("94 MB", lambda: round(kv_bytes() * 2048 / 1e6) == 94),
    ("Six such requests take more memory", lambda: 6 * kv_bytes() * 2048 > 537_919_488),
    ("134.5 M weights, 0.54 GB", lambda: round(537_919_488 / 4e6, 1) == 134.5),
]
M1_CLAIMS: Claims = [
    ("# Three requests, one after the other, take twelve steps", lambda: len(M1["steps"]) == 12),
    (
        'In step 7, B samples ".", its stop string',
        lambda: M1["steps"][6]["requests"]["B"]["state"] == "stop",
    ),
    ("C waits for seven steps", lambda: min(n for n in range(1, 13) if "C" in batch(M1, n)) == 8),
    ("Nine of twelve steps read **all weights for one row**", lambda: single(M1) == 9),
    (
        "prefills of 10, 5 and 12 rows",
        lambda: [sum(b.values()) for b in forwards_of(M1) if sum(b.values()) > 1] == [10, 5, 12],
    ),
    ("**14 and 14:**", lambda: computed(M1, "A") == 14),
    ("60 without the cache, 14 with it", lambda: computed(M1, "A") == 14),
]
M2_CLAIMS: Claims = [
    ("`m1` runs 12 forwards for 12 output tokens", lambda: len(forwards_of(M1)) == 12),
    ("C's first token comes at step 8", lambda: first_token(M1, "C") == 8),
    ("10 + 4, 5 + 1 and 12 + 4, so 36", lambda: sum(computed(M1, w) for w in "ABC") == 36),
    ("**C's whole prompt, and nothing else.**", lambda: batch(M2, 3) == {"C": 12}),
    ("`m2` runs 7 forwards instead of 12", lambda: len(forwards_of(M2)) == 7),
    ("C's first token comes at step 3 instead of 8", lambda: first_token(M2, "C") == 3),
    (
        "A has written 11, and B has ended",
        lambda: M2["steps"][1]["requests"]["A"]["computed"] == 11,
    ),
    (
        "A reserved 32 slots and will never use more than 14",
        lambda: M2["config"]["max_model_len"] == 32 and computed(M2, "A") == 14,
    ),
    ("its 15 tokens are copied", lambda: M2["steps"][5]["requests"]["C"]["computed"] == 15),
    (
        'A feeds its second output token, ",", at position 11',
        lambda: M2["steps"][2]["requests"]["A"]["computed"] == 11,
    ),
    ('C feeds " Rome" at position 12', lambda: M2["steps"][2]["said"]["C"] == " Rome"),
]
M3_CLAIMS: Claims = [
    (
        "C's row of the table is `6 7 8 10 12 13`",
        lambda: table(M3, 5, "C") == [6, 7, 8, 10, 12, 13],
    ),
    ("2 + 1 = 27**.", lambda: slots(M3, 5, "C", range(11, 12)) == [27]),
    ("A holds seven pages", lambda: len(table(M3, 5, "A")) == 7),
    (
        "Two steps ago, pages 6, 7 and 8 were B's",
        lambda: [owner(M3, 2, p) for p in (6, 7, 8)] == ["B"] * 3,
    ),
    (
        "B's pages 6, 7, 8 are free after step 3",
        lambda: [owner(M3, 3, p) for p in (6, 7, 8)] == [None] * 3,
    ),
    ("In step 4 they are C's", lambda: [owner(M3, 4, p) for p in (6, 7, 8)] == ["C"] * 3),
    ("Page 9 is A's since step 3", lambda: owner(M3, 3, 9) == "A" and owner(M3, 2, 9) is None),
    ("its seven pages are free at once", lambda: len(table(M3, 5, "A")) == 7),
    ("In step 8, C takes one of them, page 1", lambda: owner(M3, 8, 1) == "C"),
    ("**A's one token first, then 7 of C's 12.**", lambda: batch(M3, 4) == {"A": 1, "C": 7}),
    (
        "A's position is 11, so the page index is 5, the page is 9",
        lambda: table(M3, 4, "A")[5] == 9,
    ),
    ("the offset is 1, and the slot is 19", lambda: slots(M3, 4, "A", range(11, 12)) == [19]),
    (
        "```figure flat m3_example 4",
        lambda: in_new_slots("m3_example", "4") == [*range(12, 18), 19, 20],
    ),
    (
        'A\'s " Thursday" is at position 12, page 11, slot 22',
        lambda: slots(M3, 5, "A", range(12, 13)) == [22],
    ),
    (
        "C's positions 7 to 11 are in slots 21, 24, 25, 26 and 27",
        lambda: slots(M3, 5, "C", range(7, 12)) == [21, 24, 25, 26, 27],
    ),
    (
        "In **step 9**, A needs a page and none is free",
        lambda: RETRACT["steps"][8]["retracted"] == ["C"],
    ),
    (
        "Then C computes its 18 tokens again",
        lambda: [batch(RETRACT, n).get("C") for n in (10, 11, 12)] == [8, 8, 2],
    ),
    (
        "After step 8, all 17 pages are held",
        lambda: (
            sum(o is not None for p, o in RETRACT["steps"][7]["pages"].items() if p != "0") == 17
        ),
    ),
    ("C's nine pages go to the free list", lambda: len(table(RETRACT, 8, "C")) == 9),
    ("20 requests wait", lambda: 24 - len(MAP["m2_continuous"]) == 20),
    ("**Six tokens.** B computed", lambda: computed(M3, "B") == 6),
    (
        'The first tile has its maximum at "The"',
        lambda: max(range(4), key=lambda n: SCORES["scores"][n]) == 0,
    ),
    (
        'The second tile has a larger one at " Paris"',
        lambda: SCORES["tokens"][max(range(8), key=lambda n: SCORES["scores"][n])] == " Paris",
    ),
]
M4_CLAIMS: Claims = [
    ("**6 of 12.**", lambda: batch(M4, 4)["C"] == 6),
    ("The run takes 8 steps instead of 9", lambda: (len(M4["steps"]), len(M3["steps"])) == (8, 9)),
    ("Each of the 12 prompts has 172 tokens", lambda: 40 + 120 + 12 == 172),
    ('B\'s page 8, " is Paris", now belongs to the tree', lambda: nodes(M4, 3)["is Paris"] == [8]),
    ("After step 4, C uses page 6 as well", lambda: 6 in table(M4, 4, "C")),
    (
        'Both requests begin with the node "The capital of France"',
        lambda: [SPLIT["tables"][w][:2] for w in "CD"] == [[1, 2], [1, 2]],
    ),
    ("split between pages 2 and 3", lambda: SPLIT["frames"][1]["nodes"]["2"]["pages"] == [1, 2]),
    (
        "The old object, node 1, becomes the lower half",
        lambda: SPLIT["frames"][1]["nodes"]["1"]["parent"] == 2,
    ),
    (
        "Node 2 is new, and inherits the lock count",
        lambda: SPLIT["frames"][1]["nodes"]["2"]["locks"] == 1,
    ),
    ("X: 0-35 idle=X_waits, 35-36 forward", lambda: admissions_before(3) == 35),
    ("at most `MAX_OVERTAKING` = 32 of those", lambda: MAX_OVERTAKING == 32),
    ("without in-batch sharing: 36 tokens", lambda: in_batch(sharing=False) == [36]),
    ("with it: 20 tokens", lambda: in_batch(sharing=True) == [12, 4 + 4]),
    (
        "the node that C and D share has two locks",
        lambda: SPLIT["frames"][-1]["nodes"]["2"]["locks"] == 2,
    ),
]
M5_CLAIMS: Claims = [
    ("Sizes are 1, 2, 4, 8, 16, 24", lambda: graph_sizes(24) == [1, 2, 4, 8, 16, 24]),
    (
        "five requests run in the graph of size 8",
        lambda: min(n for n in graph_sizes(24) if n >= 5) == 8,
    ),
    ("# Overlap needs ten forwards for the same text", lambda: len(forwards_of(M5)) == 10),
    (
        "it finds 4 cached tokens instead of 6",
        lambda: (batch(M5, 5)["C"], M5["steps"][4]["requests"]["C"]["cached"]) == (7, 4),
    ),
    (
        "B's token from forward 4 is **dropped**",
        lambda: "B" in batch(M5, 4) and M5["steps"][2]["requests"]["B"]["state"] == "stop",
    ),
    ("A is not in forward 7", lambda: "A" not in batch(M5, 7) and "A" in batch(M5, 6)),
    ("forward 4 still writes B's token to **page 10**", lambda: owner(M5, 3, 10) == "B"),
    (
        'After step 4, page 10 is free, and page 8, " is Paris", belongs to the tree',
        lambda: owner(M5, 4, 10) != "B" and nodes(M5, 4)["is Paris"] == [8],
    ),
    (
        "C is in row 2, so its input is -3",
        lambda: (
            FUTURES["forwards"][1]["before"] == [-3] and M5["steps"][5]["requests"]["C"]["row"] == 2
        ),
    ),
    (
        'forward 6 has stored " Rome" there',
        lambda: FUTURES["words"][str(FUTURES["forwards"][0]["stored"]["3"])] == " Rome",
    ),
]
CLAIMS: dict[str, Claims] = {
    "0_opening": OPENING, "m1_single": M1_CLAIMS, "m2_continuous": M2_CLAIMS,
    "m3_paged": M3_CLAIMS, "m4_radix": M4_CLAIMS, "m5_overlap": M5_CLAIMS,
}  # fmt: skip


def kv_bytes() -> int:
    """Return the bytes that the keys and values of a token take in the embedded model."""
    config = shared_model(EngineConfig().model).model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def in_new_slots(name: str, number: str) -> list[int]:
    """Return the numbers in the slots of the flat batch that a figure draws."""
    drawn = re.findall(r'<text class="chip-ink strong" [^>]*font-size="20"[^>]*>(\d+)</text>',
                       inputs.flat(name, number))  # fmt: skip
    return [int(slot) for slot in drawn]


def admissions_before(num_waiting: int) -> int:
    """Return after how many admissions a request is due that arrives behind some others."""
    policy = SchedulePolicy(EngineConfig(), KVCacheManager(1, 1, 1))
    late = make_request("X", 4)
    policy.on_arrival(late, num_waiting)
    for number in range(100):
        if policy.is_due(late):
            return number
        other = make_request(f"{number}", 4)
        policy.on_arrival(other, 0)
        policy.on_admission(other)
    raise AssertionError("I5: never due")


def in_batch(*, sharing: bool) -> list[int]:
    """Return the prompt tokens of each step, for D, E and F with 8 of 12 tokens in common."""
    config = EngineConfig(page_size=2, max_num_seqs=8, max_model_len=200)
    scheduler = m4_scheduler.Scheduler(config, 40)
    if not sharing:
        scheduler.admission.waits_for_prefix = lambda *_: False  # type: ignore[method-assign]
    for number, who in enumerate("DEF"):
        own = [100 * (number + 1) + i for i in range(4)]
        scheduler.add_request(make_request(who, [*range(1, 9), *own], max_tokens=5))
    found = []
    while scheduler.waiting:
        batch = scheduler.schedule()
        found.append(sum(n for r, n in batch.tokens_per_request() if n > 1))
        scheduler.update_from_output(batch, [(7, None)] * len(batch.sampled_requests))
    return found


def text_of(deck: str) -> str:
    return (ROOT / "slides" / "decks" / f"{deck}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("deck", CLAIMS)
def test_what_a_deck_says_about_its_examples(deck: str) -> None:
    text = text_of(deck)
    for words, holds in CLAIMS[deck]:
        assert words in text, f"the deck no longer says {words!r}: change its claim too"
        assert holds(), f"{deck} says {words!r}, and that is not so"


def test_the_budget_of_m2_counts_padding() -> None:
    """The prediction of m2's deck: 10, 5 and 12 tokens, a budget of 32; and the same on m3."""
    assert "12 = **36**" in text_of("m2_continuous")
    scheduler = m2_scheduler(10, 5, 12, max_num_batched_tokens=32, max_num_seqs=3)
    assert scheduled(scheduler.schedule()) == [("0", 10), ("1", 5)]
    paged: Any = build_engine("m3_paged", max_num_batched_tokens=32, page_size=2, num_pages=60)
    for name, length in (("A", 10), ("B", 5), ("C", 12)):
        paged.add_request(list(range(1, length + 1)), greedy(2), name)
    paged.step()
    assert "On `m3`, without padding, all three fit: 27." in text_of("m2_continuous")
    assert paged.stats().prefill_tokens == 27
    paged.close()


def test_what_the_deck_of_m4_says_about_pages_of_four() -> None:
    found = re.search(r"prompts of ([\d, and]+) tokens, all cached, reuse ([\d, and]+) tokens",
                      text_of("m4_radix"))  # fmt: skip
    assert found
    lengths, reused = ([int(n) for n in re.findall(r"\d+", words)] for words in found.groups())
    for length, expected in zip(lengths, reused, strict=True):
        engine: Any = build_engine("m4_radix", page_size=4, num_pages=40)
        for _ in range(2):
            engine.generate([list(range(1, length + 1))], greedy(9, ignore_eos=True))
        assert engine.stats().cached_prompt_tokens == expected, length
        engine.close()


def test_the_ratio_of_m3_falls_as_its_deck_says() -> None:
    assert "starts at 0.7 and falls to 0.1 over 600 steps" in text_of("m3_paged")
    admission: Admission = make_scheduler(8).admission
    assert admission.new_token_ratio == pytest.approx(0.7)
    for _ in range(599):
        admission.expect_less()
    assert admission.new_token_ratio > 0.1 + 1e-9
    admission.expect_less()
    assert admission.new_token_ratio == pytest.approx(0.1)


@pytest.mark.thorough("a copy of the tree, and a run of tests, for each mistake")
@pytest.mark.parametrize(
    ("name", "mutant", "test", "says"),
    [
        ("m1_single", "positions_start_at_zero", "tests/invariants/test_i1_one_answer.py",
         "I1: token 1 is 209, not 81"),
        ("m5_overlap", "pages_are_freed_at_once", "tests/engine/test_overlap.py",
         "I3: a free page is written"),
        ("m5_overlap", "the_row_itself_is_the_name", "tests/engine/test_overlap.py", "I1, I2"),
    ],
)  # fmt: skip
def test_the_mistake_of_a_deck_gives_its_message(
    name: str, mutant: str, test: str, says: str, tmp_path: Any
) -> None:
    """A deck quotes the message of a test that a mistake turns red."""
    assert says in text_of(name)
    found = catalog.find_mutant(name, mutant)
    tree = mutants.copy(ROOT, tmp_path / "tree")
    with Runner() as runner, mutants.applied(found, tree) as refusal:
        assert refusal is None
        run = runner.run(tree, [test], seconds=60, options=[f"--milestone={name}"])
    messages = [result.failure.message for result in run.results if result.failure]
    assert any(says in message for message in messages), messages[:5]


def test_the_race_of_the_opening_is_that_of_the_picture() -> None:
    """The bars are the median runs, which README's picture draws."""
    deck = (ROOT / "slides/decks/0_opening.md").read_text(encoding="utf-8")
    race = ladder_runs.load()
    bars = dict(re.findall(r"= ladder_runs\.seconds\.(\w+)\[(\d)\]$", deck, re.MULTILINE))
    drawn = {name: race.seconds[name][int(place)] for name, place in bars.items()}
    assert drawn == {name: lane.seconds for name, lane in race.lanes.items()}
