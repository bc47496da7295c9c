"""Messages under way over links that they share, in simulated time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappush

from lightning_autopipe.planner.links import Channel, Route, max_min_rates

Event = tuple[float, int, int]
"""When, a number that orders events of one time, and who: an index of whoever handles it."""

Message = tuple[float, float, int, int, float]
"""Bytes, latency, who sends it, what it holds, and when it was handed over."""


class Transfers:
    """All messages under way.

    Messages of one route follow each other, as on one connection; those of different routes share channels fairly
    (max-min), or take turns in the order of sending where a channel is first-in-first-out.

    Args:
        events: the simulation's heap; the end of what a route sends is pushed with the route's index plus ``offset``.
        number: gives the next event's number.
        routes: of messages, by index; each with at least one channel.
        channels: those that routes name.
        offset: index of route 0 among all who handle events.
    """

    def __init__(
        self,
        events: list[Event],
        number: Callable[[], int],
        routes: Sequence[Route],
        channels: Sequence[Channel],
        offset: int,
    ) -> None:
        self._events, self._number, self._offset = events, number, offset
        self._waiting: list[deque[Message]] = [deque() for _ in routes]
        turns: dict[int, deque[int]] = {index: deque() for index, channel in enumerate(channels) if channel.is_fifo}
        self._turns = [[turns[channel] for channel in route.channels if channel in turns] for route in routes]
        self._bandwidths = [route.bandwidth_bytes_per_s for route in routes]
        self._channels, self._channel_bandwidths = _binding_channels(routes, channels)
        self._sharers = _sharers(self._channels)
        self._sending = 0  # a bit for each route
        self._rates_of: dict[int, list[tuple[int, float]]] = {}
        self._rates = [0.0] * len(routes)
        self._left = [0.0] * len(routes)
        self._since = [0.0] * len(routes)
        self.due = [-1] * len(routes)
        """Number of the event that ends what each route sends; one with another number is out of date."""

    def send(self, route: int, message: Message) -> None:
        """Hands a message over, now."""
        waiting = self._waiting[route]
        waiting.append(message)
        turns = self._turns[route]
        if turns:
            for turn in turns:
                turn.append(route)
            self._begin_where_first(message[4], route)
        elif len(waiting) == 1:
            self._begin(message[4], route)

    def end(self, now: float, route: int) -> Message:
        """The message that the route has sent now; what waited for it begins."""
        waiting = self._waiting[route]
        message = waiting.popleft()
        turns = self._turns[route]
        if waiting and not turns:
            num_bytes = waiting[0][0]
            self._left[route], self._since[route] = num_bytes, now
            self._expect(now + num_bytes / self._rates[route], route)
            return message
        self._sending ^= 1 << route
        others = self._sharers[route] & self._sending
        if others:
            self._share(now, others)
        for turn in turns:
            turn.popleft()
        for turn in turns:
            if turn:
                self._begin_where_first(now, turn[0])
        return message

    def _begin_where_first(self, now: float, route: int) -> None:
        if self._sending >> route & 1:
            return
        for turn in self._turns[route]:
            if turn[0] != route:
                return
        self._begin(now, route)

    def _begin(self, now: float, route: int) -> None:
        num_bytes = self._waiting[route][0][0]
        self._left[route], self._since[route] = num_bytes, now
        self._sending |= 1 << route
        if self._sharers[route] & self._sending:
            self._rates[route] = 0.0
            self._share(now, 1 << route)
        else:
            rate = self._rates[route] = self._bandwidths[route]
            self._expect(now + num_bytes / rate, route)

    def _share(self, now: float, changed: int) -> None:
        """Gives new rates to some routes and all that share channels with them, directly or through others."""
        group = todo = changed
        sending, sharers = self._sending, self._sharers
        while todo:
            lowest = todo & -todo
            more = sharers[lowest.bit_length() - 1] & sending & ~group
            group |= more
            todo = todo ^ lowest | more
        shares = self._rates_of.get(group)
        if shares is None:
            shares = self._rates_of[group] = self._shares(group)
        rates, left, since = self._rates, self._left, self._since
        for route, rate in shares:
            old = rates[route]
            if rate != old:
                remaining = left[route] - (now - since[route]) * old
                if remaining < 0.0:
                    remaining = 0.0
                left[route], since[route], rates[route] = remaining, now, rate
                self._expect(now + remaining / rate, route)

    def _expect(self, when: float, route: int) -> None:
        number = self.due[route] = self._number()
        heappush(self._events, (when, number, self._offset + route))

    def _shares(self, group: int) -> list[tuple[int, float]]:
        routes = [route for route in range(group.bit_length()) if group >> route & 1]
        rates = max_min_rates([self._channels[route] for route in routes], self._channel_bandwidths)
        return list(zip(routes, rates, strict=True))


def _binding_channels(
    routes: Sequence[Route], channels: Sequence[Channel]
) -> tuple[list[tuple[int, ...]], list[float]]:
    """The channels of each route that can be the reason why it does not go at its full speed, and all bandwidths.

    A channel that has room for all its routes at full speed slows none of them. A route that is slower than each of the
    rest has a channel of its own for that, behind the others.
    """
    load = [0.0] * len(channels)
    for route in routes:
        for channel in route.channels:
            load[channel] += route.bandwidth_bytes_per_s
    bandwidths = [channel.bandwidth_bytes_per_s for channel in channels]
    binding: list[tuple[int, ...]] = []
    for route in routes:
        used = tuple(channel for channel in route.channels if load[channel] > bandwidths[channel])
        if all(bandwidths[channel] > route.bandwidth_bytes_per_s for channel in used):
            used = (*used, len(bandwidths))
            bandwidths.append(route.bandwidth_bytes_per_s)
        binding.append(used)
    return binding, bandwidths


def _sharers(channels: Sequence[Sequence[int]]) -> list[int]:
    """For each route a bit for every other route that shares a channel with it."""
    users: dict[int, int] = {}
    for route, used in enumerate(channels):
        for channel in used:
            users[channel] = users.get(channel, 0) | 1 << route
    sharers = []
    for route, used in enumerate(channels):
        others = 0
        for channel in used:
            others |= users[channel]
        sharers.append(others & ~(1 << route))
    return sharers
