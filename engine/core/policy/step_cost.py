"""Step cost model: measured times of decode steps, prompt tokens and swaps, which decide prompt budgets and swapping.

The modelled time of a step is that of its decoding sequences alone, plus a constant time per prompt token:

    seconds
      |                            . / slope: token_s, the moving average over steps with prompts
      |                        . /
      |  D(seqs) -----------/          a step without prompts: a moving average for each power of two of sequences
      +--------------------------- prompt tokens
"""

from __future__ import annotations

STEADY = 1 / 8  # weight of a new decode-only step in the moving average
FRESH = 1 / 4  # maximum weight of a new step with prompts in the moving average; also the weight of a new swap
ROUND = 64  # prompt tokens from which a step with prompts has full weight
OUTLIER = 3.0  # a measurement is clipped to this multiple of the average, since other processes delay steps, too
AIM = 0.7  # fraction of the time limit that prompts may use; the rest covers errors of the averages
MIN_TOKENS = 1  # minimum prompt tokens of a step, so that every prompt makes progress
CROWD = 4  # prompts get more time if there are more pending prompts than decoding sequences divided by this
FIRST = 128  # prompt tokens of a step before any measurement; with an 8B model on two CPU cores they take seconds
FLOOR = 64  # minimum prompt tokens on a slow machine: with fewer, reading the weights would dominate the step
PACE = 1 / 2  # weight of a new decode-only step in `pace`
PACE_STEPS = 8  # `pace` is unknown when this many steps have passed since the last decode-only one
STALE = 64  # an average is measured again when this many steps have passed since its last decode-only step
PROBE = 64  # after this many consecutive steps with prompts, one step has none, to measure decode-only steps


class StepCostModel:
    """Moving averages of measured times, in seconds; 0 until measured.  Every method takes O(1)."""

    def __init__(self, swap_bytes_per_s: float = 0.0) -> None:
        """`swap_bytes_per_s`: a first estimate of the swap bandwidth; 0: unknown."""
        self.swap_bytes_per_s = swap_bytes_per_s
        self.token_s = 0.0  # seconds per prompt token, in addition to the decode-only step; 0: unknown
        self._decode_s: dict[int, float] = {}  # bit length of seqs -> seconds of a decode-only step
        # load_class of seqs -> (seconds, steps measured, number of the last such step)
        self._nearby: dict[tuple[int, int], tuple[float, int, int]] = {}
        self._steps = 0  # all steps measured
        self._pace, self._paced_at = 1.0, -PACE_STEPS  # see `pace`, and the number of the step that measured it
        self.mixed_steps = 0  # steps with slices and decoding sequences since the last one without slices

    def record_step(self, seconds: float, seqs: int, prompt_tokens: int) -> None:
        """Learn from the time of a step without swaps.  `seqs`: sequences that decoded in it."""
        self._steps += 1
        if not prompt_tokens:
            self.mixed_steps = 0
            size = seqs.bit_length()
            average = self._decode_s.get(size, seconds)
            self._decode_s[size] = average + STEADY * (min(seconds, OUTLIER * average) - average)
            self._record_nearby(seconds, load_class(seqs))
            return
        self.mixed_steps += seqs > 0
        alone = self.decode_s(max(1, seqs))
        beyond = max(0.0, seconds - alone)
        reading = beyond / prompt_tokens
        if not self.token_s:
            self.token_s = reading
        # Few prompt tokens get full weight, too, if they took most of the step's time.
        weight = FRESH * min(1.0, max(prompt_tokens / ROUND, beyond / alone if alone else 0.0))
        self.token_s += weight * (min(reading, OUTLIER * self.token_s) - self.token_s)

    def _record_nearby(self, seconds: float, size: tuple[int, int]) -> None:
        average, count, last = self._nearby.get(size, (seconds, 0, self._steps))
        count = 0 if self._steps - last > STALE else count
        if count:
            relative = min(OUTLIER, max(1 / OUTLIER, seconds / average)) if average else 1.0
            self._pace = self.pace + PACE * (relative - self.pace)
            self._paced_at = self._steps
        # The plain mean of the first steps, so that the very first step does not dominate the average.
        average += max(STEADY, 1 / (count + 1)) * (min(seconds, OUTLIER * average) - average)
        self._nearby[size] = average, count + 1, self._steps

    def record_bound(self, seconds: float, seqs: int) -> None:
        """Record that a decode-only step of `seqs` sequences takes at most `seconds`: a larger step took this time.

        If `seconds` is below the average, the machine has become faster since decode-only steps were measured."""
        self._steps += 1
        average, count, last = self._nearby.get(load_class(seqs), (0.0, 0, 0))
        if seconds < average:
            self._nearby[load_class(seqs)] = average + STEADY * (seconds - average), count, last

    @property
    def pace(self) -> float:
        """Slowdown of the machine: time of the latest decode-only steps over their averages; above 1 while other work
        runs.

        1 if none of the last PACE_STEPS steps was decode-only."""
        return self._pace if self._steps - self._paced_at < PACE_STEPS else 1.0

    def record_swap(self, size: int, seconds: float) -> None:
        """Learn from the time of a copy of `size` bytes between device and host."""
        rate = size / seconds
        self.swap_bytes_per_s += FRESH * (rate - self.swap_bytes_per_s) if self.swap_bytes_per_s else rate

    def readings(self, seqs: int) -> int:
        """Return how many decode-only steps with about `seqs` sequences (within 1/8) were measured.

        0 if the last of them is more than STALE steps ago."""
        _, count, last = self._nearby.get(load_class(seqs), (0.0, 0, 0))
        return count if self._steps - last <= STALE else 0

    def decode_s(self, seqs: int) -> float:
        """Return the seconds of a decode-only step with `seqs` sequences; 0: no step was measured.

        Falls back to the nearest smaller measured batch size, then to the smallest measured one."""
        if not self._decode_s:
            return 0.0
        size = seqs.bit_length()
        return self._decode_s[max((s for s in self._decode_s if s <= size), default=min(self._decode_s))]

    def exact_decode_s(self, seqs: int) -> float:
        """Return the seconds of a decode-only step with about `seqs` sequences (within 1/8); else `decode_s`.

        `decode_s` puts 64 to 127 sequences into one class, which is too coarse while the load rises or falls."""
        average, _, _ = self._nearby.get(load_class(seqs), (0.0, 0, 0))
        return average or self.decode_s(seqs)

    def prompt_tokens(self, seqs: int, pending: int, stretch: float, exposed: int | None = None) -> int | None:
        """Return the maximum prompt tokens with `seqs` decoding sequences, for `stretch` times the decode-only time.

        The bound rises in proportion to the `pending` prompts: a bound chosen for one long prompt would halve the
        throughput of many short prompts.

        `exposed`: number of decoding sequences that the bound protects, at least 1; None: all of them.

        Returns 0 to measure a decode-only step; None: nothing was measured yet."""
        if not self.token_s:
            return None
        if not (alone := self.decode_s(seqs)) or self.mixed_steps >= PROBE:
            return 0
        time = AIM * (stretch - 1) * alone * max(1.0, CROWD * pending / (exposed or seqs))
        return max(MIN_TOKENS, int(time / self.token_s))

    def tokens_within(self, seqs: int, seconds: float) -> int | None:
        """Return the maximum prompt tokens with `seqs` decoding sequences, for a step of at most `seconds`.

        Prompts get at least the time of a decode-only step, and at least FLOOR tokens.  Otherwise a slow machine would
        spend most of a prompt's time on reading the weights.  None: nothing was measured yet."""
        if not self.token_s:
            return None
        alone = self.decode_s(max(1, seqs))
        return max(FLOOR, int(max(seconds - alone, alone) / self.token_s))

    def swap_pays(self, swap_bytes: int, recompute_tokens: int) -> bool:
        """Return whether swapping `swap_bytes` (both directions together) takes less time than recomputing the tokens.

        False while one of the two times is unknown."""
        if not self.swap_bytes_per_s or not self.token_s:
            return False
        return swap_bytes / self.swap_bytes_per_s < recompute_tokens * self.token_s


def load_class(seqs: int) -> tuple[int, int]:
    """Return the class of a number of sequences: numbers with equal first four bits, which differ by less than 1/8."""
    shift = max(0, seqs.bit_length() - 4)
    return seqs >> shift, shift
