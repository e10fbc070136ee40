"""Step 5, run: requests through a compiled deployment, batched continuously.

A step computes one token of every running sequence and fills what is left of its token budget
with prefill, in chunks where a prompt is longer. A sequence starts when a slot and the pages it
may come to need are free; until then it waits, in order. Where prefix caching is on, the pages of
tokens that an earlier prompt of the replica began with too are not computed again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import numpy as np
from max import tree
from max.driver import Buffer
from max.nn.kv_cache import KVCacheInputsPerDevice
from max.pipelines.context import ImageMetadata, TextAndVisionContext, TextContext, TokenBuffer
from max.pipelines.kv_cache import PagedKVCacheManager
from max.pipelines.lib.interfaces.pipeline_model import ModelOutputs

from builder.compile import Compiled
from builder.images import Pixels, image_hash
from builder.sampling import Logits, Sampler
from builder.step_times import StepTime, StepTimes
from models.buffers import host_values
from models.kv_cache import with_prefix_caching
from models.repeated_step import RepeatedStep


@dataclass(eq=False)
class Request:
    """One sequence to continue, and how far it came."""

    prompt_ids: list[int]
    """The prompt."""

    max_new_tokens: int
    """Tokens to generate at most; 0 only prefills."""

    sampler: Sampler
    """Chooses its tokens."""

    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it; the stop token is the last of ``ids``."""

    adapter: str = ""
    """The name of its adapter; empty for none."""

    crops: Sequence[Pixels] = ()
    """The crops of its images, float32 ``[channels, side, side]``, in the prompt's order; the
    prompt has the tokens that each becomes."""

    on_logits: Callable[[Logits], None] | None = None
    """Receives float32 ``[rows, vocabulary]`` of each step's own tokens, from a graph that
    returns all logits."""

    ids: list[int] = field(default_factory=list)
    """The continuation so far."""

    finish: str | None = None
    """``stop``, ``length``, ``interrupted`` or ``error``; ``None`` while it goes on."""

    cached_tokens: int = 0
    """Tokens of the prompt that were not computed, as their keys and values were there."""

    started: float | None = None
    """When its first step began, by ``time.perf_counter``."""

    token_times: list[float] = field(default_factory=list)
    """When each token of ``ids`` was there, by ``time.perf_counter``."""


Running = tuple[Request, TextContext]
"""A request under way, and MAX's context of it."""


class Runner:
    """Runs requests on a compiled deployment.

    Args:
        compiled: The deployment.
    """

    def __init__(self, compiled: Compiled) -> None:
        self.plan = compiled.registration.plan
        self.model = compiled.model
        self.times = StepTimes()
        self._batch = self.plan.batch
        self._step_tokens = self._batch.max_batch_input_tokens
        self._page_size = self.plan.deployment.kv.page_size
        self._unshared = count()
        self._repeated: RepeatedStep | None = None
        """Makes the next steps while the batch stays as it is."""
        self._kv = PagedKVCacheManager(
            params=with_prefix_caching(self.model.kv_params, self.plan.prefix_caching),
            session=compiled.session,
            total_num_pages=self.plan.num_pages,
            max_batch_size=self._batch.max_batch_size,
        )

    def run(
        self,
        requests: Iterable[Request],
        on_token: Callable[[Request, int], None] = lambda _request, _token: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Continues every request until it finishes.

        Args:
            requests: What to continue; their ``ids`` and ``finish`` are filled in.
            on_token: Told each token as it is chosen.
            should_stop: Asked before each step; when true, what is unfinished ends as
                ``interrupted`` with the tokens it has.
        """
        waiting = deque(requests)
        ended = "interrupted"
        replicas: list[list[Running]] = [[] for _ in range(self.plan.num_replicas)]
        try:
            while (waiting or any(replicas)) and not should_stop():
                self._admit(waiting, replicas)
                self._step(replicas, on_token)
                for running in replicas:
                    for pair in [pair for pair in running if pair[0].finish is not None]:
                        running.remove(pair)
                        self._release(*pair)
        except Exception:
            ended = "error"
            raise
        finally:
            for request, context in chain.from_iterable(replicas):
                request.finish = request.finish or ended
                self._release(request, context)
            for request in waiting:
                request.finish = ended

    def touch_pages(self) -> None:
        """Writes to every KV page of the host, while no sequence has one.

        The system gives memory when it is first written, which would be part of the first steps
        that reach a page; where speed is measured it is done before.
        """
        inputs = self._kv.runtime_inputs([[] for _ in range(self.plan.num_replicas)])
        for cache in tree.leaves(inputs, leaf=KVCacheInputsPerDevice):
            if cache.kv_blocks.device.is_host:
                cache.kv_blocks.to_numpy()[...] = 0

    def limit_step(self, tokens: int) -> None:
        """Makes steps smaller than the deployment allows, never larger.

        Args:
            tokens: Tokens of one step of a replica.
        """
        assert self._batch.max_batch_size <= tokens <= self._batch.max_batch_input_tokens
        self._step_tokens = tokens

    def free_pages(self) -> int:
        """Pages that no sequence holds, over all replicas; what is in them may be used again."""
        return sum(self._kv.block_count(i).free for i in range(self.plan.num_replicas))

    def _release(self, request: Request, context: TextContext) -> None:
        self._repeated = None
        _catch_up(request, context)
        self._kv.release(context)
        self.model.release(context.request_id)

    def _pages(self, request: Request) -> int:
        return -(-(len(request.prompt_ids) + request.max_new_tokens) // self._page_size)

    def _admit(self, waiting: deque[Request], replicas: Sequence[list[Running]]) -> None:
        """Starts what fits, in order, each on the replica with the most pages left."""
        free = [
            self.plan.num_pages - sum(self._pages(request) for request, _ in running)
            for running in replicas
        ]
        while waiting:
            request = waiting[0]
            # All pages it may need are set aside, so nothing running is ever put back.
            able = [
                index
                for index, running in enumerate(replicas)
                if len(running) < self._batch.max_batch_size and self._pages(request) <= free[index]
            ]
            if not able:
                assert any(replicas), "resolve and the tasks refuse what fits no empty cache"
                return
            # Of equal replicas, the one with the fewest sequences.
            chosen = max(able, key=lambda index: (free[index], -len(replicas[index])))
            free[chosen] -= self._pages(request)
            self._repeated = None
            context = self._context(request)
            self._kv.claim(context, chosen)
            replicas[chosen].append((waiting.popleft(), context))

    def _context(self, request: Request) -> TextContext:
        ids = np.array(request.prompt_ids, np.int64)
        facts: dict[str, Any] = {
            "model_name": request.adapter,
            "max_length": self.plan.max_length,
            "tokens": TokenBuffer(ids),
            "cache_salt": self._salt(request),
        }
        if not request.crops:
            return TextContext(**facts)
        vision = self.plan.settings.vision
        assert vision is not None
        places = np.flatnonzero(ids == vision.image_token_id).reshape(len(request.crops), -1)
        return TextAndVisionContext(
            **facts,
            vision_token_ids=[vision.image_token_id],
            images=[
                ImageMetadata(
                    start_idx=int(own[0]),
                    end_idx=int(own[-1]) + 1,
                    pixel_values=pixels,
                    # Stands for the image where pages are compared: its tokens are all alike.
                    image_hash=image_hash(pixels) if self.plan.prefix_caching else None,
                )
                for own, pixels in zip(places, request.crops, strict=True)
            ],
        )

    def _salt(self, request: Request) -> str | None:
        """What else two prompts have to agree in that share pages."""
        if request.on_logits is not None:
            # It is owed the logits of every token.
            return f"request {next(self._unshared)}"
        adapters = self.model.adapters
        adapter = 0 if adapters is None else adapters.number(request.adapter)
        return f"adapter {adapter}" if adapter else None

    def _step(
        self,
        replicas: Sequence[Sequence[Running]],
        on_token: Callable[[Request, int], None],
    ) -> None:
        if self._repeated is not None and self._repeated.left:
            self._repeat(self._repeated, list(chain.from_iterable(replicas)), on_token)
            return
        began = time.perf_counter()
        batches = [self._schedule(running) for running in replicas]
        batch = list(chain.from_iterable(batches))
        for request, _ in batch:
            if request.started is None:
                request.started = began
        tokens = sum(context.tokens.active_length for _, context in batch)
        decoding = sum(bool(request.ids) for request, _ in batch)
        contexts = [[context for _, context in chosen] for chosen in batches]
        inputs = self.model.prepare_initial_token_inputs(
            contexts, kv_cache_inputs=self._kv.runtime_inputs(contexts)
        )
        before = time.perf_counter()
        outputs = self.model.execute(inputs)
        execute = time.perf_counter() - before
        self._deliver_logits(batch, outputs)
        next_token_logits = outputs.next_token_logits
        assert next_token_logits is not None
        next_logits = host_values(next_token_logits)
        for row, (request, context) in enumerate(batch):
            if context.tokens.actively_chunked:
                context.tokens.advance_chunk()
            else:
                _take(request, next_logits[row], on_token)
                _catch_up(request, context)
            self._kv.step(context)
        alike = decoding == tokens == sum(map(len, replicas))
        only = outputs.logits is next_token_logits
        self._repeated = self.model.repeated(inputs) if alike and only else None
        self.times.each.append(StepTime(tokens, decoding, execute, time.perf_counter() - began))

    def _repeat(
        self,
        repeated: RepeatedStep,
        batch: Sequence[Running],
        on_token: Callable[[Request, int], None],
    ) -> None:
        """Computes a step of a batch that is as it was.

        MAX's contexts and the KV manager are told of its tokens when a sequence needs the next
        page, or ends.
        """
        began = time.perf_counter()
        tokens = [request.ids[-1] for request, _ in batch]
        before = time.perf_counter()
        outputs = repeated.execute(tokens)
        execute = time.perf_counter() - before
        # On the host, which to_numpy would first ask for.
        for (request, _), logits in zip(batch, np.from_dlpack(outputs), strict=True):
            _take(request, logits, on_token)
        took = time.perf_counter() - began
        self.times.each.append(StepTime(len(batch), len(batch), execute, took))

    def _schedule(self, running: Sequence[Running]) -> list[Running]:
        """Chooses a replica's step: what decodes, then prompts, the last in a chunk."""
        batch = [pair for pair in running if pair[0].ids]
        for request, context in batch:
            _catch_up(request, context)
            self._kv.alloc(context)
        budget = self._step_tokens - len(batch)
        for request, context in running:
            if request.ids or budget == 0:
                continue
            before = context.tokens.processed_length
            # Of the whole rest of the prompt: what is cached of it is more than a chunk.
            self._kv.alloc(context)
            request.cached_tokens += context.tokens.processed_length - before
            if self._is_computed_beside(context, batch):
                continue
            if context.tokens.active_length > budget:
                context.tokens.chunk(budget)
            budget -= context.tokens.active_length
            batch.append((request, context))
        return batch

    def _is_computed_beside(self, context: TextContext, batch: Sequence[Running]) -> bool:
        """Whether the next page of a prompt is computed for another in this step.

        The prompt then waits a step for it.
        """
        if not self.plan.prefix_caching:
            return False
        tokens, size = context.tokens, self._page_size
        end = (tokens.processed_length // size + 1) * size
        return end < len(tokens) and any(
            end <= other.tokens.current_position
            and context.cache_salt == other.cache_salt
            and np.array_equal(tokens[:end], other.tokens[:end])
            for request, other in batch
            # An image's tokens don't say which it is.
            if not request.ids and not isinstance(other, TextAndVisionContext)
        )

    def _deliver_logits(self, batch: Sequence[Running], outputs: ModelOutputs) -> None:
        if all(request.on_logits is None for request, _ in batch):
            return
        assert isinstance(outputs.logit_offsets, Buffer)
        logits, offsets = host_values(outputs.logits), host_values(outputs.logit_offsets)
        for row, (request, _) in enumerate(batch):
            if request.on_logits is not None:
                request.on_logits(logits[offsets[row] : offsets[row + 1]])


def _take(request: Request, logits: Logits, on_token: Callable[[Request, int], None]) -> None:
    """Chooses a request's next token, unless it only prefills."""
    if request.max_new_tokens == 0:
        request.finish = "length"
        return
    token = request.sampler.choose(logits)
    request.ids.append(token)
    request.token_times.append(time.perf_counter())
    if token in request.stop_ids:
        request.finish = "stop"
    elif len(request.ids) >= request.max_new_tokens:
        request.finish = "length"
    on_token(request, token)


def _catch_up(request: Request, context: TextContext) -> None:
    """Tells MAX's context the tokens that it has not been told."""
    for token in request.ids[len(context.tokens) - len(request.prompt_ids) :]:
        context.tokens.advance_with_token(token)
