"""Print the examples of the built-in fine-tuning: `python .ci/chain_sum_examples.py > configs/chain_sum.jsonl`.

Each line has a question of the quick start's task and an answer that shows the running sum.
"""

import json

from titanrl.data.examples import worked_sum
from titanrl.data.streams import make_gym_dataset

TASK_CONFIG = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}
NUM_EXAMPLES = 2000


def main() -> None:
    """Print distinct questions of the task, in the order in which the task generates them."""
    dataset = make_gym_dataset("chain_sum", TASK_CONFIG, seed=1, size=2 * NUM_EXAMPLES)
    expressions = {entry["question"]: entry["metadata"]["expression"] for entry in dataset}
    for question, expression in list(expressions.items())[:NUM_EXAMPLES]:
        working, answer = worked_sum(expression)
        print(json.dumps({"prompt": question, "completion": f"<think>{working}</think><answer>{answer}</answer>"}))


if __name__ == "__main__":
    main()
