"""Work that a request begins before its first wait has begun when its handler goes on (Python 3.12)."""

from __future__ import annotations

import asyncio
import sys

import pytest

from launch.http.app import _started_eagerly


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks begin with the next turn of the event loop")
def test_work_has_run_to_its_first_wait() -> None:
    async def main() -> None:
        begun = []

        async def work() -> int:
            begun.append(1)
            await asyncio.sleep(0)
            return 7

        task = _started_eagerly(work())
        assert begun == [1] and not task.done()
        assert await task == 7

    asyncio.run(main())


def test_its_result_and_error_are_those_of_a_task() -> None:
    async def main() -> None:
        async def work() -> int:
            raise ValueError("wrong")

        task = _started_eagerly(work())
        with pytest.raises(ValueError, match="wrong"):
            await task

    asyncio.run(main())
