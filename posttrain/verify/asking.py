"""Requests of a reward to a judge model: concurrent requests in threads, and a summary of their replies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from posttrain.verify import endpoint as server
from posttrain.verify.http_client import Cancellation


async def ask_all(
    endpoint: server.Settings, texts: Sequence[str], seeds: Sequence[int], concurrency: int
) -> list[server.Reply]:
    """Ask the endpoint every text with every seed, with at most `concurrency` requests of this worker at a time.

    If the reward's time is over, or a request fails, the other requests are cancelled: they would spend the budget.
    """
    cancellation = Cancellation()
    loop, threads, server_settings = asyncio.get_running_loop(), _threads(concurrency), server.Endpoint(**endpoint)
    chats = [([{"role": "user", "content": text}], seed) for text in texts for seed in seeds]
    try:
        return await asyncio.gather(
            *(
                loop.run_in_executor(threads, server.ask, server_settings, messages, seed, cancellation)
                for messages, seed in chats
            )
        )
    finally:
        cancellation.cancel()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=count)


def reply_summary(replies: Sequence[server.Reply], scores: Sequence[float | None]) -> dict[str, float | None]:
    """Return {"reward": mean of parsed scores, "unparsed": share, "cached": share of replies from the cache}."""
    read = [score for score in scores if score is not None]
    return {
        "reward": sum(read) / len(read) if read else None,
        "unparsed": 1 - len(read) / len(scores),
        "cached": sum(reply.cached for reply in replies) / len(replies),
    }
