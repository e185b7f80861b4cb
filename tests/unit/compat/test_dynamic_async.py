"""The asynchronous pair, as programs for asyncio use it."""

import asyncio
import threading

import pytest

from exl2flow.compat.exllamav2.generator import (
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicGeneratorAsync,
    ExLlamaV2DynamicJobAsync,
    ExLlamaV2Filter,
    ExLlamaV2Sampler,
)
from exl2flow.core.errors import FilterDeadEnd

GREEDY = ExLlamaV2Sampler.Settings.greedy()
PROMPTS = ["The quick brown", "A tokenizer", "Numbers such as 3.14"]


def test_jobs_run_together_and_one_is_cancelled_half_way(model, cache, tokenizer) -> None:
    async def text_of(generator, prompt: str, *, most: int | None = None) -> str:
        job = ExLlamaV2DynamicJobAsync(
            generator, tokenizer.encode(prompt), 40, gen_settings=GREEDY, identifier=prompt
        )
        text, count = "", 0
        async for result in job:
            assert result["identifier"] == prompt
            text += result.get("text", "")
            count += result["stage"] == "streaming"
            if count == most:
                await job.cancel()
        return text

    async def main() -> list[str]:
        generator = ExLlamaV2DynamicGeneratorAsync(model, cache, tokenizer)
        most = [None, 5, None]
        pairs = zip(PROMPTS, most, strict=True)
        texts = await asyncio.gather(*(text_of(generator, p, most=m) for p, m in pairs))
        texts.append(await text_of(generator, PROMPTS[0]))  # after all others have ended
        await generator.close()
        return texts

    texts = asyncio.run(main())

    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    expected = generator.generate(PROMPTS, 40, gen_settings=GREEDY, completion_only=True)
    assert [texts[0], texts[2], texts[3]] == [expected[0], expected[2], expected[0]]
    assert expected[1].startswith(texts[1])
    assert 0 < len(texts[1]) < len(expected[1])
    assert generator.native.free_pages == generator.max_pages


def test_a_job_that_nobody_reads_leaves_the_listing_when_it_ends(model, cache, tokenizer) -> None:
    async def main() -> None:
        generator = ExLlamaV2DynamicGeneratorAsync(model, cache, tokenizer)
        jobs = [ExLlamaV2DynamicJobAsync(generator, tokenizer.encode(p), 8) for p in PROMPTS]
        async for _ in jobs[0]:
            break
        while generator.generator.num_remaining_jobs():
            await asyncio.sleep(0.01)
        generator.generator.set_loras(None)
        late = [result async for result in jobs[1]]  # its results are there all the same
        again = [result async for result in jobs[1]]
        await generator.close()

        assert [result["eos"] for result in late].count(True) == 1
        assert "".join(r.get("text", "") for r in late) == jobs[1].job.full_completion
        assert again == []

    asyncio.run(asyncio.wait_for(main(), 30))


def test_jobs_of_a_closed_loop_end_and_leave_the_listing(model, cache, tokenizer) -> None:
    def begin(generator) -> None:
        async def main() -> None:
            ids = tokenizer.encode(PROMPTS[0])
            async for _ in ExLlamaV2DynamicJobAsync(generator, ids, 10_000 // len(PROMPTS[0])):
                break

        asyncio.run(main())

    async def main() -> None:
        generator = ExLlamaV2DynamicGeneratorAsync(model, cache, tokenizer)
        await asyncio.to_thread(begin, generator)
        while not generator.generator.native.is_idle:
            await asyncio.sleep(0.01)
        generator.generator.set_loras(None)
        await generator.close()

        assert generator.generator.num_remaining_jobs() == 0
        assert generator.generator.native.free_pages == generator.generator.max_pages

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_job_that_another_task_cancels_ends_its_iteration(model, cache, tokenizer) -> None:
    async def main() -> list[dict]:
        generator = ExLlamaV2DynamicGeneratorAsync(model, cache, tokenizer)
        job = ExLlamaV2DynamicJobAsync(generator, tokenizer.encode(PROMPTS[0]), 900)

        async def read() -> list[dict]:
            return [result async for result in job]

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        await job.cancel()
        assert generator.generator.num_remaining_jobs() == 0
        await job.cancel()
        found = await reading
        await generator.close()
        return found

    found = asyncio.run(asyncio.wait_for(main(), 30))

    assert not any(result["eos"] for result in found)


def test_errors_and_closing_end_the_iteration(model, cache, tokenizer) -> None:
    class Nothing(ExLlamaV2Filter):
        def begin(self, prefix_str: str) -> None: ...
        def feed(self, token) -> None: ...
        def next(self) -> tuple[list[int], list[int]]:
            return [], []

    async def main() -> list[dict]:
        generator = ExLlamaV2DynamicGeneratorAsync(model, cache, tokenizer)
        ids = tokenizer.encode(PROMPTS[0])
        bad = ExLlamaV2DynamicJobAsync(generator, ids, 8, filters=[Nothing(model, tokenizer)])
        good = ExLlamaV2DynamicJobAsync(generator, ids, 900)
        with pytest.raises(FilterDeadEnd):
            [_ async for _ in bad]
        await generator.close()
        return [result async for result in good]

    assert not any(result["eos"] for result in asyncio.run(main()))


def test_an_error_of_the_device_reaches_all_jobs(model, cache, tokenizer, monkeypatch) -> None:
    all_wait = threading.Event()

    def fail() -> None:
        all_wait.wait(10)
        raise RuntimeError("device lost")

    async def main() -> list[BaseException]:
        generator = ExLlamaV2DynamicGeneratorAsync(model, cache, tokenizer)
        monkeypatch.setattr(generator.generator.native._decode, "step", fail)
        jobs = [ExLlamaV2DynamicJobAsync(generator, tokenizer.encode(p), 8) for p in PROMPTS]
        all_wait.set()

        async def read(job) -> None:
            async for _ in job:
                pass

        found = await asyncio.gather(*map(read, jobs), return_exceptions=True)
        monkeypatch.undo()
        await generator.close()
        return found

    assert [str(error) for error in asyncio.run(main())] == ["device lost"] * 3
