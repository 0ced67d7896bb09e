"""Which of several engines takes a request: the one that holds most of its prompt, unless it is too busy. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

M = TypeVar("M", bound=Hashable)


class PrefixHolders(Generic[M]):
    """Which engines have computed which prefixes, as far as requests tell.

    A key stands for a prompt from its first token up to some block. Keys that were used least recently are forgotten,
    and the end of a prompt before its beginning.
    """

    def __init__(self, most_keys: int = 1 << 18) -> None:
        self._holders: OrderedDict[Hashable, set[M]] = OrderedDict()
        self._most_keys = most_keys

    def choose(
        self, keys: Sequence[Hashable], least: M, load: Callable[[M], float], slack: float, among: Iterable[M] = ()
    ) -> tuple[M, int]:
        """The engine that holds the longest prefix among those with at most ``slack`` more load than the ``least``.

        Also how many of the first keys it holds.

        Of several, the one with the lowest load; ``least``, which has the lowest of all, if none holds anything.
        ``keys`` are of the prompt's blocks, in order. With ``among``, no other engine is taken.
        """
        allowed, most = set(among), load(least) + slack
        for depth in range(len(keys), 0, -1):
            found = self._holders.get(keys[depth - 1])
            if not found:
                continue
            if least in found:
                return least, depth
            near = [each for each in found if (not allowed or each in allowed) and load(each) <= most]
            if near:
                return min(near, key=load), depth
        return least, 0

    def add(self, keys: Sequence[Hashable], machine: M) -> None:
        """Note that an engine computes a prompt."""
        for key in reversed(keys):
            self._holders.setdefault(key, set()).add(machine)
            self._holders.move_to_end(key)
        while len(self._holders) > self._most_keys:
            self._holders.popitem(last=False)

    def keep(self, machines: set[M]) -> None:
        """Forget all other engines."""
        for key, found in list(self._holders.items()):
            found &= machines
            if not found:
                del self._holders[key]


def ranked(
    machines: Sequence[M], holders: PrefixHolders[M], keys: Sequence[Hashable], load: Callable[[M], float], slack: float
) -> list[M]:
    """Engines in the order in which a request should try them: the chosen one, then those with less load."""
    by_load = sorted(machines, key=load)
    if not by_load:
        return []
    best, _ = holders.choose(keys, by_load[0], load, slack, machines)
    return [best, *(each for each in by_load if each != best)]
