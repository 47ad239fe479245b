"""lm-evaluation-harness: two small tasks, against a server or in Hugging Face's backend.

    with_lm_eval.py FOLDER              Hugging Face's model in the folder
    with_lm_eval.py FOLDER URL MODEL    a server; the folder has the tokenizer

It prints the scores, the log probability of each choice, and each text. The data are made here,
because no other data can be read without a network.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
    "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "Cuba": "Havana",
    "Austria": "Vienna", "Norway": "Oslo", "Poland": "Warsaw", "Peru": "Lima", "Ireland": "Dublin",
    "Portugal": "Lisbon", "Sweden": "Stockholm", "Kenya": "Nairobi", "Iran": "Tehran",
    "Iraq": "Baghdad", "Turkey": "Ankara", "Canada": "Ottawa", "Chile": "Santiago", "Fiji": "Suva",
}  # fmt: skip
EXAMPLE = "Question: What is the capital of Denmark?\nAnswer: Copenhagen\n\n"
QUESTION = EXAMPLE + "Question: What is the capital of {{country}}?\nAnswer:"


def choices_of(index: int) -> list[str]:
    """Return four cities; the right one is at `index` modulo 4."""
    cities = list(CAPITALS.values())
    wrong = [cities[(index + step) % len(cities)] for step in (5, 11, 17)]
    place = index % 4
    return [*wrong[:place], cities[index], *wrong[place:]]


def write_tasks(folder: Path) -> None:
    """Write the two tasks and their data into a folder. JSON is YAML, too."""
    rows = [
        {"country": country, "city": city, "choices": choices_of(i), "answer": i % 4}
        for i, (country, city) in enumerate(CAPITALS.items())
    ]
    data = folder / "capitals.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared: dict[str, Any] = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test", "doc_to_text": QUESTION,
    }  # fmt: skip
    tasks: dict[str, dict[str, Any]] = {
        "choice": {
            "output_type": "multiple_choice", "doc_to_choice": "choices",
            "doc_to_target": "answer", "target_delimiter": " ",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
        "text": {
            "output_type": "generate_until", "doc_to_target": "{{city}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
            "filter_list": [{"name": "words", "filter": [
                {"function": "remove_whitespace"}, {"function": "take_first"},
            ]}],
            "metric_list": [
                {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True},
            ],
        },
    }  # fmt: skip
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **shared, **task}))


def main(folder: str, url: str | None = None, name: str | None = None) -> dict[str, Any]:
    """Return scores, log probabilities and texts."""
    model, given = "hf", dict[str, Any](pretrained=folder, dtype="float32", device="cpu")
    if url is not None:
        model = "local-completions"
        given = {
            "model": name, "base_url": f"{url}/completions", "tokenizer": folder,
            "tokenizer_backend": "huggingface", "num_concurrent": 8, "max_length": 1024,
        }  # fmt: skip
    with tempfile.TemporaryDirectory() as data:
        write_tasks(Path(data))
        found: Any = simple_evaluate(
            model=model, model_args=given, tasks=["choice", "text"], log_samples=True,
            task_manager=TaskManager(include_path=data, include_defaults=False),
            batch_size=1, bootstrap_iters=0,
        )  # fmt: skip
    samples = found["samples"]
    return {
        "acc": found["results"]["choice"]["acc,none"],
        "exact_match": found["results"]["text"]["exact_match,words"],
        "logprobs": [[float(r[0]) for r in s["filtered_resps"]] for s in samples["choice"]],
        "greedy": [[bool(r[1]) for r in s["filtered_resps"]] for s in samples["choice"]],
        "texts": [sample["resps"][0][0] for sample in samples["text"]],
    }


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(*sys.argv[1:])))
