"""What the deck of the electives and the case of m4 say about their recorded runs is true.

`test_slides.py` runs the recorded runs again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from milestones.chain import place
from milestones.course import catalog
from milestones.electives.hybrid_memory.kv_groups import WindowPages
from milestones.electives.hybrid_memory.state_slots import StateSlots
from slides.facts import recorded
from slides.figures import forwards_of
from slides.record_mistakes import M4_MUTANT, SPECULATIVE_MUTANT
from slides.sources import mutant_lines
from tests.conftest import ROOT
from tests.exercises import test_multi_step_1 as multi_step_1
from tests.exercises import test_speculative_1 as speculative_1
from tests.exercises import test_structured_output_2 as structured_output_2
from tests.exercises.by_hand import make_request
from tests.helpers import elective_claims

Json = dict[str, Any]
Claims = list[tuple[str, Callable[[], Any]]]


CASE, PLANS, M5, LANES, VAIN, DRAFTS, MISTAKE = (
    recorded(name)
    for name in (
        "m4_mistake", "multi_step_example", "m5_example", "multi_step_lanes", "multi_step_vain",
        "speculative_drafts", "speculative_mistake",
    )
)  # fmt: skip
ANSWER, LOOPS, SWAPS, WAITS, POOLED, BESIDE, ADAPTERS = (
    recorded(name)
    for name in (
        "structured_answer", "structured_lanes", "priority_example", "priority_waits",
        "embedding_example", "embedding_gaps", "lora_example",
    )
)  # fmt: skip
PAGES, STATES = recorded("hybrid_pages"), recorded("hybrid_states")
POLICIES = recorded("agents_policies")
PACKED = {row["cache"]: row for row in recorded("kv_quant_memory")["rows"]}
LATENCIES = {row["machines"]: row for row in recorded("disaggregated_latencies")["rows"]}
IMAGES = {row["kept"]: row for row in recorded("vision_images")["rows"]}
LOGPROBS = {row["variant"]: row["logprobs"] for row in recorded("invariance_answers")["rows"]}
RIGHT, WRONG = CASE["right"], CASE["wrong"]
ROWS = [run["after_reset"]["pages"][0] for run in (RIGHT, WRONG)]
TREES = [run["after_reset"]["tree"] for run in (RIGHT, WRONG)]  # after A


def policy(name: str, figure: str = "again") -> float:
    """Return a figure of a policy of agents: the tokens that a resumed call computes again."""
    [row] = (row for row in POLICIES["rows"] if row["policy"] == name)
    return float(row[figure])


def dropped(run: Json) -> int:
    """Return the tokens of B that are computed after the step in which its end is read."""
    states = [step["requests"]["B"]["state"] for step in run["steps"]]
    return sum("B" in batch for batch in forwards_of(run)[states.index("stop") + 1 :])


def gaps(run: Json) -> list[float]:
    return [b["start"] - a["end"] for a, b in pairwise(run["forward"])]


def planned() -> list[list[str]]:
    scheduler = multi_step_1.make_scheduler()
    multi_step_1.decoding(
        scheduler, make_request("a", [1, 2], max_tokens=4), make_request("b", [3], max_tokens=6)
    )
    return multi_step_1.plan(scheduler)


def calls() -> list[str]:
    """Return the calls of an engine that runs one request, with a grammar of three tokens."""
    engine = structured_output_2.made()
    structured_output_2.add(engine, "a", 1, 3)
    structured_output_2.tokens_of(engine)
    found: list[str] = engine.events
    return found


def code(name: str, file: str) -> str:
    return (ROOT / place(name) / f"{file}.py").read_text(encoding="utf-8")


def is_run(number: str) -> bool:
    """Run the claim about the prediction of an exercise. It raises if it is wrong."""
    for check in elective_claims.CLAIMS[number][1]:
        check()
    return True


def wait(engine: str, key: str) -> float:
    """Return a number of the table of priority: of the load with urgent requests."""
    (row,) = (r for r in WAITS["rows"] if (r["load"], r["engine"]) == ("urgent", engine))
    return float(row[key])


def computed(name: str) -> list[int]:
    """Return the tokens of a request in each step of the run of embedding; 0 where it has none."""
    return [step["tokens"].get(name, 0) for step in POOLED["steps"]]


def first_block(num_tokens: int) -> int:
    """Return the first block that the query after some tokens sees, in a window of 8 tokens."""
    return WindowPages(8, 4).first_block(num_tokens)


def chunk_ends() -> list[int]:
    """Return where the chunks end of the second prompt of the recorded run."""
    slots, ends = StateSlots(4, STATES["page_size"]), [0]
    request = make_request("second", STATES["prompt"])
    request.row = 0
    slots.start(request, [], STATES["stem"] // STATES["page_size"])
    while ends[-1] < request.num_tokens:
        request.num_computed_tokens = ends[-1]
        ends.append(slots.chunk_end(request, request.num_tokens))
    return ends[1:]


def in_vain(name: str) -> int:
    return int(VAIN["runs"][name]["in_vain"])


ELECTIVES: Claims = [
    ("there is one gap for eight forwards", lambda: (
        1 <= sum(gap > 0.5 for gap in gaps(LANES["multi_step"])) <= 2)),
    ("In m5 there is none", lambda: max(gaps(LANES["m5_overlap"])) < 0.5),
    ("Both pictures are recorded runs on one scale", lambda: (
        len(LANES["m5_overlap"]["forward"]) == len(LANES["multi_step"]["forward"]))),
    ("**Five steps and eight tokens.**", lambda: (
        (len(planned()), sum(map(len, planned()))) == (5, 8))),
    ("in which one token of B is dropped", lambda: dropped(M5) == 1),
    ("Here it is as many as the plan has steps left", lambda: dropped(PLANS) > 1),
    ("All engines return the same", lambda: (
        len({run["tokens"] for run in VAIN["runs"].values()}) == 1)),
    ("Where a plan of eight steps throws away four tokens, it throws away one", lambda: (
        round(in_vain("plans_of_8") / in_vain("m5_overlap")) == 4)),
    ("**9.** Both earlier places match", lambda: (
        speculative_1.propose([1, 2, 8, 1, 2, 9, 1, 2], 4, (2,)) == [9, 1, 2])),
    ("Every step appends at least one token", lambda: (
        min(step["appended"] for step in DRAFTS["steps"]) >= 1)),
    ("Up to the first difference, everything is right", lambda: all(
        step["own"][: step["appended"] - 1] == step["drafts"][: step["appended"] - 1]
        for step in DRAFTS["steps"])),
    ("Three tests of the exercise find it", lambda: len(catalog.find("speculative.2").red) == 3),
    ("Up to the first wrong draft they are equal", lambda: (
        MISTAKE["right"]["text"]["text"][:12] == MISTAKE["wrong"]["text"]["text"][:12]
        and MISTAKE["right"]["text"]["text"] != MISTAKE["wrong"]["text"]["text"])),
    ("from a copy of the sources with this mistake", lambda: (
        MISTAKE["mutant"] == SPECULATIVE_MUTANT)),
]  # fmt: skip
STRUCTURED: Claims = [
    ("In most of them the grammar leaves one token", lambda: (
        2 * [step["allowed"] for step in ANSWER["steps"]].count(1) > len(ANSWER["steps"]))),
    ("At the color, several tokens are allowed", lambda: (
        [step["allowed"] > 1 for step in ANSWER["steps"] if step["token"] == "red"] == [True])),
    ("and the model decides", lambda: all(
        step["own"] == step["token"] for step in ANSWER["steps"] if step["token"] == "red")),
    ("The last token is the end", lambda: (
        ANSWER["steps"][-1]["token"] == "<|im_end|>" and ANSWER["finish_reason"] == "stop")),
    ("the schema has two keys, `color` and `sweet`", lambda: (
        [*json.loads(ANSWER["text"])] == ["color", "sweet"])),
    ("`launch sample`, three times `launch accept sample`, and `launch accept`.", lambda: (
        calls() == ["launch", "sample", *["launch", "accept", "sample"] * 3, "launch", "accept"])),
    ("so there is no gap, exactly as in m5", lambda: (
        max(gaps(LOOPS["plain"])) == max(gaps(LOOPS["delayed"])) == 0)),
    ("would take the overlap from all requests of its batch", lambda: (
        min(gaps(LOOPS["waiting"])) > 1)),
    ("`sample_newest` is called twice", lambda: (
        code("structured_output", "engine").count("self.sample_newest()") == 2)),
    ("One test of the exercise finds it", lambda: (
        catalog.find("structured_output.1").mistake == "a_grammar_is_shared"
        and len(catalog.find("structured_output.1").red) == 1)),
]  # fmt: skip
PRIORITIES: Claims = [
    ("`urgent` arrives before step 3", lambda: (
        ["urgent" in step["tokens"] for step in SWAPS["steps"][:3]] == [False, False, True])),
    ("So six pages are copied", lambda: SWAPS["steps"][2]["to_host"] == 6),
    ("In step 6, the pages come back. Only **two** tokens", lambda: (
        SWAPS["steps"][5]["tokens"] == {"low": 2})),
    ("four pages come back. The other two were still in the tree", lambda: (
        SWAPS["steps"][5]["from_host"] == 4 and (14 - 2) // SWAPS["page_size"] == 4 + 2)),
    ("the pages of `urgent`, which has ended, move", lambda: (
        SWAPS["steps"][5]["to_host"] == (18 + 2) // SWAPS["page_size"])),
    ("**One**, and **two**.", lambda: (
        is_run("priority.2"))),
    ("# Urgent requests wait two steps at most", lambda: wait("host_2", "urgent_p95") == 2),
    ("The price is six tokens", lambda: wait("host_2", "computed") - wait("m5", "computed") == 6),
    ("pay for it with three steps at the median", lambda: (
        wait("host_2", "others_p50") - wait("m5", "others_p50") == 3)),
    ("Seven requests were preempted", lambda: wait("host_2", "preempted") == 7),
    ("Two tests of the exercise find it", lambda: (
        catalog.find("priority.1").mistake == "a_source_is_dropped"
        and len(catalog.find("priority.1").red) == 2)),
]  # fmt: skip
AGENTS: Claims = [
    ("**It does not wait.** The last three pages of the second conversation are evicted", lambda: (
        is_run("agents.1"))),
    ("In the tail of the pauses, hints alone save nothing", lambda: (
        policy("hints", "tail_again") == policy("LRU", "tail_again")
        > policy("oracle", "tail_again"))),
    ("Host memory saves more than any hint alone, and both together save most", lambda: (
        policy("hints_host") < policy("LRU_host") < policy("hints"))),
    ("A time to live protects conversations from other requests, and not from each other", lambda: (
        policy("LRU") > policy("TTL") > policy("estimate") > policy("hints") > policy("oracle"))),
    ("and the host has room for it", lambda: (
        policy("hints_host", "tail_again") < policy("hints", "tail_again"))),
    ("Four tests of the exercise find it. A pin is the simple design", lambda: (
        catalog.find("agents.1").mistake == "a_protection_pins"
        and len(catalog.find("agents.1").red) == 4)),
]  # fmt: skip
KV_QUANT: Claims = [
    ("**The scale is 1**, and the integers are 127, 64, 0 and 0", lambda: is_run("kv_quant.1")),
    ("More requests run together, so fewer steps serve them all", lambda: (
        2 * PACKED["float32"]["running"] < PACKED["int8"]["running"]
        and 2 * PACKED["int8"]["steps"] < PACKED["float32"]["steps"])),
    ("A better answer that depends on the load", lambda: (
        catalog.find("kv_quant.1").mistake == "one_scale_for_a_step")),
]  # fmt: skip
DISAGGREGATED: Claims = [
    ("The first step sends **page 0**, the second step sends **pages 1 and 2**", lambda: (
        is_run("disaggregated.1"))),
    ("# The latency between tokens is steady, the first token comes later", lambda: (
        2 * LATENCIES["two_sides"]["itl_p99"] < LATENCIES["chunks_256"]["itl_p99"]
        and LATENCIES["two_sides"]["ttft_p50"] > LATENCIES["chunks_256"]["ttft_p50"])),
    ("Chunks of 64 are close in the first number, and worse in the second", lambda: (
        LATENCIES["chunks_64"]["itl_p99"] < 1.5 * LATENCIES["two_sides"]["itl_p99"]
        and LATENCIES["chunks_64"]["ttft_p50"] > LATENCIES["two_sides"]["ttft_p50"])),
    ("With 32 layers, 31 of them are sent while others are computed", lambda: (
        LATENCIES["two_sides"]["sent"][1] == f"{31 / 32:.0%}")),
    ("stopped again and again, and ends with an error", lambda: (
        catalog.find("disaggregated.2").mistake == "a_fixed_time_limit")),
]  # fmt: skip
INVARIANCE: Claims = [
    ("**At position 20**, the first token that is decoded", lambda: is_run("invariance.1")),
    ("bfloat16 is not the cause: with a fixed order, it gives one answer", lambda: (
        LOGPROBS["exact"] == LOGPROBS["fixed_bf16"] == 1 < LOGPROBS["split_k"])),
    ("The difference begins with **one bit**", lambda: (
        catalog.find("invariance.1").mistake == "close_is_equal")),
]  # fmt: skip
VISION: Claims = [
    ("**Position 11**, and the answer begins at position **12**", lambda: is_run("vision.1")),
    ("The encoder cache helps wherever the image stands, but it saves no prompt token", lambda: (
        IMAGES["encoder_cache"]["encoded"] == 4 < IMAGES["radix_keys"]["encoded"]
        and IMAGES["encoder_cache"]["computed"] == IMAGES["nothing"]["computed"])),
    ("The keys of images let requests share pages", lambda: (
        IMAGES["radix_keys"]["computed"] < IMAGES["nothing"]["computed"])),
    ("the hit rate is even better", lambda: (
        catalog.find("vision.1").mistake == "all_images_share_keys")),
]  # fmt: skip
HYBRID: Claims = [
    ("one with full attention, two with windows", lambda: PAGES["groups"] == 3),
    ("A window needs few pages, however long the context is", lambda: (
        PAGES["last"]["windows"] <= 2 * (PAGES["window"] // PAGES["page_size"] + 1))),
    ("pages of the two groups with windows", lambda: (
        PAGES["first"]["windows"] == PAGES["last"]["windows"] < PAGES["last"]["full"])),
    ("After 10 tokens **0, 1 and 2**; after 11 **1 and 2**", lambda: is_run("hybrid_memory.1")),
    ("sees: 3-11 plan=3_to_10", lambda: [first_block(n) for n in (10, 11, 16)] == [0, 1, 2]),
    ("chunks: 0-40 forward=to_40, 40-64 forward=to_64, 64-65 forward", lambda: (
        chunk_ends() == [40, 64, 65])),
    ("can resume after 16 cached tokens. **It cannot resume after 12.**", lambda: (
        is_run("hybrid_memory.2"))),
    ("the second prompt is computed from its first token", lambda: (
        STATES["computed"]["second"] == STATES["computed"]["first"] == STATES["prompt"])),
    ("the third prompt resumes there", lambda: (
        STATES["prompt"] - STATES["computed"]["third"] == STATES["stem"] // 8 * 8)),
    ("Four tests of the exercise find it", lambda: (
        catalog.find("hybrid_memory.2").mistake == "only_the_last_page_is_asked_for"
        and len(catalog.find("hybrid_memory.2").red) == 4)),
]  # fmt: skip
EMBEDDINGS: Claims = [
    ("`MEAN` arrives before step 2", lambda: (
        [count > 0 for count in computed("MEAN")[:2]] == [False, True])),
    ("so it is computed in two chunks, and each chunk gives a sum", lambda: (
        computed("MEAN") == [0, 7, 7, 0, 0, 0]
        and [step["pooled"] for step in POOLED["steps"][1:3]] == [["MEAN"]] * 2)),
    ("device: 0-7 forward=sum_of_7_tokens", lambda: computed("MEAN")[1:3] == [7, 7]),
    ("With the second one, the request ends", lambda: "MEAN" in POOLED["steps"][2]["ended"]),
    ("It finds three of its pages in the cache, and computes **two** tokens", lambda: (
        POOLED["cached"] == 3 * POOLED["page_size"] and computed("LAST") == [0, 0, 0, 0, 2, 0])),
    ("The text gets a token in every step", lambda: min(computed("text")) >= 1),
    ("**Eight**, and **two**.", lambda: is_run("embedding.2")),
    ("no text ever waits for a second step", lambda: (
        {row["gap_steps"] for row in BESIDE["rows"]} == {1})),
    ("A small budget divides it into many short steps", lambda: (
        [row["gap_tokens_max"] for row in BESIDE["rows"] if row["vectors"]] == [16, 64, 128])),
    ("and then the vectors are late", lambda: (
        [row["vector_steps"] for row in BESIDE["rows"] if row["vectors"]] == [54, 4, 2])),
    ("no vectors, any budget", lambda: (
        {row["gap_tokens_p50"] for row in BESIDE["rows"] if not row["vectors"]} == {8})),
    ("One test of the exercise finds it. A test that sends each text once", lambda: (
        catalog.find("embedding.2").mistake == "a_mean_uses_cached_pages"
        and len(catalog.find("embedding.2").red) == 1)),
]  # fmt: skip
LORA: Claims = [
    ("In step 2, C has no slot and waits", lambda: ADAPTERS["steps"][1]["waiting"] == ["r3"]),
    ("In step 3, a request without an adapter joins before it", lambda: (
        ADAPTERS["steps"][2]["slots"]["r4"] == 0 and "r3" in ADAPTERS["steps"][2]["waiting"])),
    ("In step 1, A and B get the two slots", lambda: (
        ADAPTERS["steps"][0]["loads"] == ["A to 1", "B to 2"])),
    ("Both join at once", lambda: {"r4", "r5"} <= ADAPTERS["steps"][2]["slots"].keys()),
    ("C is loaded into its slot", lambda: (
        [load for step in ADAPTERS["steps"][1:] for load in step["loads"]] == ["C to 2"])),
    ("**Four**: A and B for each of two slots. Rows **1, 2 and 5**.", lambda: is_run("lora.2")),
    ("One test of the exercise finds it: rows of several", lambda: (
        catalog.find("lora.2").mistake == "neighbours_share_an_adapter"
        and len(catalog.find("lora.2").red) == 1)),
]  # fmt: skip
M4_CASE: Claims = [
    ("# The case: B is wrong after a reset of the cache", lambda: (
        [name for name in WRONG if WRONG[name]["text"] != RIGHT[name]["text"]] == ["after_reset"])),
    ("right in the first two runs", lambda: (
        WRONG["alone"]["text"] == WRONG["after_a"]["text"] == RIGHT["after_reset"]["text"])),
    ("The pages 1 to 4 were on the free list **twice**", lambda: (
        {page for page in ROWS[1] if ROWS[1].count(page) > 1} == {1, 2, 3, 4})),
    ("page 1 first held the first two words", lambda: ROWS[1][0] == 1 in ROWS[1][1:]),
    ("The second half of the prompt has overwritten", lambda: (
        len(set(ROWS[0])) == len(ROWS[0]) and ROWS[1][:4] == ROWS[1][5:9])),
    ("Here it owns pages of its parent", lambda: (
        {*TREES[1][0]} <= {*TREES[1][1]} and not {*TREES[0][0]} & {*TREES[0][1]})),
    ("although B reads wrong pages", lambda: (
        WRONG["after_a"]["pages"][0] != RIGHT["after_a"]["pages"][0])),
    ("from a copy of the sources with one wrong line", lambda: (
        [line.kind for line in mutant_lines("m4_radix", M4_MUTANT)].count("add") == 1)),
    ("`test_of_a_longer_prefix_the_tree_takes_the_rest`", lambda: (
        killer("m4_radix", M4_MUTANT) == "test_of_a_longer_prefix_the_tree_takes_the_rest")),
]  # fmt: skip
CLAIMS = {
    "electives": [
        *ELECTIVES,
        *STRUCTURED,
        *PRIORITIES,
        *AGENTS,
        *DISAGGREGATED,
        *KV_QUANT,
        *INVARIANCE,
        *EMBEDDINGS,
        *HYBRID,
        *LORA,
        *VISION,
    ],
    "m4_radix": M4_CASE,
}


def killer(engine: str, name: str) -> str:
    return catalog.find_mutant(engine, name).killed_by.rpartition("::")[2]


@pytest.mark.parametrize(
    ("deck", "number"), [(deck, n) for deck, claims in CLAIMS.items() for n in range(len(claims))]
)
def test_what_a_deck_says_about_its_runs(deck: str, number: int) -> None:
    words, holds = CLAIMS[deck][number]
    text = (ROOT / "slides" / "decks" / f"{deck}.md").read_text(encoding="utf-8")
    assert words in " ".join(text.split()), f"the deck no longer says {words!r}: change its claim"
    assert holds(), f"{deck} says {words!r}, and that is not so"
