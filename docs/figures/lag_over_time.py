"""Draw leases, batches and their lags over time, with max_lag 2.

python docs/figures/lag_over_time.py > docs/figures/lag_over_time.svg
"""

from __future__ import annotations

from drawing import Drawing

LABEL = (
    "Workers lease prompts while the learner trains. A prompt that was leased while batch 0 was "
    "trained is in batch 2 at the latest if max_lag is 2; beyond that a lease waits."
)
BATCHES = 5
WIDTH = 130
LEFT = 150
# Of each lease: worker, first and last time in batches, the batch that has its group.
LEASES = (
    (0, 0.05, 0.9, 1),
    (0, 1.05, 2.7, 3),
    (0, 2.75, 3.8, 4),
    (1, 0.05, 1.8, 2),
    (1, 1.85, 2.9, 3),
    (1, 3.05, 4.6, 5),
    (2, 0.05, 0.7, 1),
    (2, 0.75, 1.6, 2),
    (2, 2.1, 3.6, 4),
)


def main() -> None:
    picture = Drawing(LEFT + WIDTH * BATCHES + 24, 318, LABEL)
    picture.text(20, 32, "leases and batches over time, max_lag 2", "title", "start")
    picture.text(20, 72, "learner", "text", "start")
    for batch in range(BATCHES):
        x = LEFT + WIDTH * batch
        picture.labelled_box(x + 2, 50, WIDTH - 4, 36, (f"trains batch {batch}",), "green")
    for worker in range(3):
        y = 122 + 46 * worker
        picture.text(20, y + 17, f"worker {worker}", "text", "start")
    for worker, first, last, batch in LEASES:
        y = 110 + 46 * worker
        lag = batch - int(first)
        kind = ("plain", "blue", "orange")[lag]
        x = LEFT + WIDTH * first
        words = f"batch {batch}, lag {lag}"
        picture.box(x, y, WIDTH * (last - first), 34, kind)
        picture.text(x + WIDTH * (last - first) / 2, y + 22, words, "small")
    wait = LEFT + WIDTH * 1.6 + 4
    picture.text(wait + 2, 110 + 46 * 2 + 22, "waits", "small", "start")
    notes = (
        "lag = the batch of a group - the batches that were trained when its prompt was leased",
        "A lease waits if its group could only enter a later batch than max_lag admits.",
    )
    for number, words in enumerate(notes):
        picture.text(20, 274 + 22 * number, words, "small", "start")
    print(picture.svg())


if __name__ == "__main__":
    main()
