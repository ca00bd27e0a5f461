"""Step cost model: measured times of steps, prompt tokens and swaps, and three decisions that rest on them.

A step takes as long as its decoding sequences alone would, plus a time for each prompt token:

    seconds
      |                            . / slope: token_s, the moving average over steps with prompts
      |                        . /
      |  D(seqs) -----------/          a step without prompts: a moving average for each power of two of sequences
      +--------------------------- prompt tokens
"""

from __future__ import annotations

STEADY = 1 / 8  # weight of a new step without prompts
FRESH = 1 / 4  # weight of a new step with ROUND prompt tokens, or with prompts for half its time; of a new swap
ROUND = 64
OUTLIER = 3.0  # a reading counts as at most this multiple of the average: other work on the machine delays steps, too
AIM = 0.7  # fraction of the time limit that prompts may take; the rest is for what the averages miss
LEAST = 1  # prompt tokens a step may always have, or a prompt would never end
CROWD = 4  # with more than 1 / CROWD as many sequences waiting for a first token as for the next, prompts get more
FIRST = 128  # prompt tokens of the steps before anything was measured: of an 8B model on two cores, seconds
FLOOR = 64  # prompt tokens that a slow machine's step may have: fewer would read all weights for next to nothing
PROBE = 64  # after this many consecutive steps with prompts one has none, to measure decode-only steps


class StepCostModel:
    """Moving averages, in seconds.  Nothing is known before it was measured.  A reading takes O(1)."""

    def __init__(self, swap_bytes_per_s: float = 0.0) -> None:
        """`swap_bytes_per_s`: a first estimate; 0: not known."""
        self.swap_bytes_per_s = swap_bytes_per_s
        self.token_s = 0.0  # seconds per prompt token, on top of the decode-only step; 0: not known
        self._decode_s: dict[int, float] = {}  # bit length of seqs -> seconds of a step without prompts
        self._nearby: dict[tuple[int, int], tuple[float, int]] = {}  # (seconds, steps) by load_class of seqs
        self.mixed_steps = 0  # steps with slices and decoding sequences since the last one without slices

    def record_step(self, seconds: float, seqs: int, prompt_tokens: int) -> None:
        """Learn from a step without a swap.  `seqs`: sequences that decoded in it."""
        if not prompt_tokens:
            self.mixed_steps = 0
            size = seqs.bit_length()
            average = self._decode_s.get(size, seconds)
            self._decode_s[size] = average + STEADY * (min(seconds, OUTLIER * average) - average)
            average, count = self._nearby.get(load_class(seqs), (seconds, 0))
            # At first the mean of all: the first step must not count for more than the next ones.
            average += max(STEADY, 1 / (count + 1)) * (min(seconds, OUTLIER * average) - average)
            self._nearby[load_class(seqs)] = average, count + 1
            return
        self.mixed_steps += seqs > 0
        alone = self.decode_s(max(1, seqs))
        beyond = max(0.0, seconds - alone)
        reading = beyond / prompt_tokens
        if not self.token_s:
            self.token_s = reading
        # A few tokens count as much as many where they took most of the step's time.
        weight = FRESH * min(1.0, max(prompt_tokens / ROUND, beyond / alone if alone else 0.0))
        self.token_s += weight * (min(reading, OUTLIER * self.token_s) - self.token_s)

    def record_swap(self, size: int, seconds: float) -> None:
        """Learn from a copy of `size` bytes between device and host."""
        rate = size / seconds
        self.swap_bytes_per_s += FRESH * (rate - self.swap_bytes_per_s) if self.swap_bytes_per_s else rate

    def readings(self, seqs: int) -> int:
        """Return how many steps of `seqs` sequences, give or take an eighth, and no prompt were measured."""
        return self._nearby.get(load_class(seqs), (0.0, 0))[1]

    def decode_s(self, seqs: int) -> float:
        """Seconds of a step with `seqs` sequences and no prompt; of fewer, or else of more, where that is not known.
        0: nothing is known."""
        if not self._decode_s:
            return 0.0
        size = seqs.bit_length()
        return self._decode_s[max((s for s in self._decode_s if s <= size), default=min(self._decode_s))]

    def exact_decode_s(self, seqs: int) -> float:
        """Seconds of a step with `seqs` sequences, give or take an eighth, and no prompt; else as `decode_s`.

        That counts 65 like 127, which is too coarse to compare with while the load rises or falls."""
        average, _ = self._nearby.get(load_class(seqs), (0.0, 0))
        return average or self.decode_s(seqs)

    def prompt_tokens(self, seqs: int, pending: int, stretch: float, exposed: int | None = None) -> int | None:
        """Most prompt tokens with `seqs` that decode, so that the step takes up to `stretch` times as long as without.

        With many `pending` prompts it may take longer in proportion.  A bound meant for one long prompt would halve
        what a flood of short ones can get through.

        `exposed`: how many of them the bound protects, at least 1; None: all of them.

        0: measure this step without any.  None: not known."""
        if not self.token_s:
            return None
        if not (alone := self.decode_s(seqs)) or self.mixed_steps >= PROBE:
            return 0
        time = AIM * (stretch - 1) * alone * max(1.0, CROWD * pending / (exposed or seqs))
        return max(LEAST, int(time / self.token_s))

    def tokens_within(self, seqs: int, seconds: float) -> int | None:
        """Most prompt tokens with `seqs` that decode, so that their step takes up to `seconds`.

        Prompts get at least the time that the step takes without them, and at least FLOOR tokens.  Otherwise a machine
        on which that time is long would spend nearly all of a prompt on reading weights.  None: not known."""
        if not self.token_s:
            return None
        alone = self.decode_s(max(1, seqs))
        return max(FLOOR, int(max(seconds - alone, alone) / self.token_s))

    def swap_pays(self, swap_bytes: int, recompute_tokens: int) -> bool:
        """Return whether moving `swap_bytes`, there and back, takes less time than recomputing the tokens.  False while
        one of the two is not known."""
        if not self.swap_bytes_per_s or not self.token_s:
            return False
        return swap_bytes / self.swap_bytes_per_s < recompute_tokens * self.token_s


def load_class(seqs: int) -> tuple[int, int]:
    """Return what numbers of sequences have in common that differ by less than an eighth: their first four bits."""
    shift = max(0, seqs.bit_length() - 4)
    return seqs >> shift, shift
