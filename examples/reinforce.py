"""REINFORCE in a corridor: each step of the run is an episode, without a data loader.

The walker starts at the left end and leaves at the right end. Each move costs 1, so the best return is
minus the corridor's length. Prints the number of moves per episode before and after the training.
"""

from __future__ import annotations

import argparse
from collections import deque
from pathlib import Path

import torch
from torch import Tensor, nn

import dualtrain as dt

LENGTH = 5  # cells
LONGEST = 100  # moves after which an episode is given up
RECENT = 20  # episodes that the solution is judged by


class Policy(nn.Module):
    """A table of logits: for each cell, of a move to the left and of a move to the right."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(LENGTH, 2))

    def play(self) -> tuple[Tensor, int]:
        """Play an episode; return the log probabilities of its moves, and their number."""
        cell, log_probs = 0, []
        while cell < LENGTH and len(log_probs) < LONGEST:
            moves = torch.distributions.Categorical(logits=self.logits[cell])
            move = moves.sample()
            log_probs.append(moves.log_prob(move))
            cell = max(cell + 2 * int(move) - 1, 0)
        return torch.stack(log_probs), len(log_probs)


def train(run: dt.Run, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Play and update until the recent episodes are almost as short as the corridor."""
    recent: deque[int] = deque(maxlen=RECENT)
    baseline = 0.0
    while not run.context.get_stop_requested():
        with run.step():
            log_probs, length = policy.play()
            returns = -torch.arange(length, 0, -1.0)  # of each move: minus the moves from there on
            loss = -(log_probs * (returns - baseline)).sum()
            baseline += 0.1 * (float(returns.mean()) - baseline)
            optimizer.zero_grad()
            loss.backward()
            run.clip_gradients(5.0)
            optimizer.step()
            run.outputs = loss
            recent.append(length)
            run.context.log("moves", length)
            if len(recent) == RECENT and sum(recent) <= 1.1 * LENGTH * RECENT:
                run.context.request_stop("solved")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000, help="at most (default: 1000)")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the table is tiny
    dt.seed_everything(0)

    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    log_file = arguments.out / "reinforce.jsonl"
    callbacks = [dt.callbacks.StepLogger(log_file, log_interval=1)]
    with dt.Run(callbacks, network=policy, optimizer=optimizer, max_steps=arguments.episodes) as run:
        train(run, policy, optimizer)

    _, moves = dt.logs.read_log(log_file).column("moves")
    print(f"{run.context.step} episodes, {run.context.stop_reason}")
    for name, some in (("first", moves[:RECENT]), ("last", moves[-RECENT:])):
        print(f"moves in the {name} {len(some)} episodes: {sum(some) / len(some):.2f} (best: {LENGTH})")
    print("probability of a move to the right:", *(f"{p:.2f}" for p in policy.logits.softmax(1)[:, 1]))
    print(log_file)


if __name__ == "__main__":
    main()
