"""Background responses: computed to their end without a connected client, even if their gateway dies.

    POST background --start--> a job reads the answer --> stored: queued, in_progress, then the final state
    its gateway dies: the lease lapses --renew, at another gateway--> a job there reads the answer from the token log
    its gateway shuts down: the lease is released, and another gateway takes the response over at once

A response that another gateway takes over is the same, token for token.  It becomes `failed` if its token log has
expired: no gateway was alive for `--resume-s` while it ran, or for `--retain-s` after it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from aiohttp import web

from quire.engine.wire.link import BusDown
from quire.engine.wire.response_store import TAKEN
from quire.service.api.openai_responses.response_format import ResponseFormat
from quire.service.api.valid_request import ValidRequest
from quire.service.common.metrics import Telemetry
from quire.service.common.refusal import Refusal
from quire.service.config import GatewayConfig
from quire.service.delivery import resume
from quire.service.delivery.open_request import HandedOver, OpenRequest
from quire.service.delivery.streams import Streams
from quire.service.http.meter import Meter
from quire.service.http.middleware import CLIENT_LEFT, Capacity
from quire.service.http.stored_responses import StoredResponses
from quire.service.text.text_stream import decode
from quire.service.text.tokenizer import Tokenizer

log = logging.getLogger("quire.gateway")

ENDPOINT = "/v1/responses in the background"  # endpoint of background jobs in metrics and log
LEASE_MS = 6000  # ms without renewal until another gateway takes over
RENEW_S = 1.5  # seconds between two renewals
STORE_TRIES = 60  # attempts to store the end of a response while Redis is away, one per second

Running = AbstractAsyncContextManager[OpenRequest]


class Job(msgspec.Struct, eq=False):
    """One background response that this gateway computes."""

    id: str
    holder: str
    valid: ValidRequest
    form: ResponseFormat
    meter: Meter


class Background:
    """The background responses of this gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        streams: Streams,
        stored: StoredResponses,
        capacity: Capacity,
        telemetry: Telemetry,
    ) -> None:
        self._config, self._tokenizer, self._streams = config, tokenizer, streams
        self._stored, self._capacity, self._telemetry = stored, capacity, telemetry
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._leased: set[str] = set()  # ids of responses whose lease in Redis belongs to this gateway

    async def serve(self, _: web.Application) -> AsyncIterator[None]:
        """Renew leases, and take over responses of dead gateways, while the app runs (aiohttp's `cleanup_ctx`)."""
        ticker = asyncio.create_task(self._renew_for_ever())
        try:
            yield
        finally:
            tasks = [ticker, *self._jobs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def start(self, job: Job, running: Running) -> None:
        """Begin a response.  `running`: the context in which its request runs.

        Returns once it is queued and stored.  Raises the errors of `running`, and Refusal if it cannot be stored."""
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The callback retrieves the exception, so that asyncio does not log it if the client has left.
        accepted.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._jobs[job.id] = asyncio.create_task(self._run(job, running, accepted))
        await asyncio.shield(accepted)

    async def cancel(self, response_id: str) -> None:
        """Stop the request of a deleted or cancelled response, which any gateway may be running.

        If Redis is away, the response continues until the next renewal at its gateway stops it."""
        with contextlib.suppress(BusDown):
            await self._streams.cancel([f"{response_id}.0"])

    # -- jobs

    async def _run(self, job: Job, running: Running, accepted: asyncio.Future[None]) -> None:
        status = CLIENT_LEFT
        try:
            with self._capacity.occupy():
                async with running as opened:
                    job.meter.admit(opened.waiting)
                    await self._begin(job, opened)
                    self._leased.add(job.id)
                    accepted.set_result(None)
                    status = await self._answer(job, opened)
        except Exception as error:
            if accepted.done():
                log.exception("the background response %s broke off; its lease will lapse", job.id)
            else:
                accepted.set_exception(error)
        finally:
            self._forget(job.id)
            if not accepted.cancel() and accepted.exception() is None:  # otherwise the client's own request records it
                job.meter.close(ENDPOINT, status)

    def _forget(self, response_id: str) -> None:
        self._jobs.pop(response_id, None)
        self._leased.discard(response_id)

    async def _begin(self, job: Job, opened: OpenRequest) -> None:
        try:
            response = job.form.response("queued")
            await self._stored.begin(job.holder, job.valid, response, LEASE_MS, job.valid.timeout_s)
        except Refusal:
            opened.resumable = False  # the client gets no id with which it could resume
            raise

    async def _answer(self, job: Job, opened: OpenRequest) -> int:
        """Read an answer to its end, and store the response.  Returns the HTTP status for metrics and log."""
        status = 200
        try:
            await self._read(job, opened)
            await job.form.prepare_end(opened.pacer)
            response = job.form.response()
        except HandedOver:
            await self._release(job)
            return 503
        except Refusal as refusal:
            opened.resumable = False  # cancels the part of the answer that is not computed yet
            job.meter.fail(refusal)
            status, response = refusal.status, job.form.failed(refusal)
        await self._end(job, response)
        return status

    async def _read(self, job: Job, opened: OpenRequest) -> None:
        begun = False
        answer = decode(opened, job.valid, self._tokenizer, each_token=job.form.each_token)
        async with contextlib.aclosing(answer) as pieces:
            async for changed in pieces:
                for piece in changed:
                    job.meter.record_delta(piece)
                job.form.read(changed)
                opened.record_sent(job.form.tokens)
                if changed and not begun:
                    begun = True
                    with contextlib.suppress(BusDown):
                        await self._stored.update(job.holder, job.form.response("in_progress"), ended=False)

    async def _end(self, job: Job, response: dict[str, Any]) -> None:
        self._leased.discard(job.id)
        for _ in range(STORE_TRIES):
            try:
                await self._stored.update(job.holder, response, ended=True)
            except BusDown:
                await asyncio.sleep(1.0)
            else:
                return
        log.error("the background response %s was not stored: Redis is away; another gateway may take it over", job.id)

    async def _release(self, job: Job) -> None:
        """Let another gateway take a response over at once."""
        self._leased.discard(job.id)
        with contextlib.suppress(BusDown):
            await self._streams.responses.renew(0, [job.id], 0)

    # -- leases

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self.renew()
            except BusDown:
                pass  # leases outlast a few failed renewals
            except Exception:  # one error must not end all leases of this gateway
                log.exception("leases of background responses were not renewed")

    async def renew(self) -> None:
        """Renew this gateway's leases, and take over responses whose lease has lapsed.  Raises BusDown."""
        most = 0 if self._capacity.draining else TAKEN
        leases = await self._streams.responses.renew(LEASE_MS, list(self._leased), most)
        for response_id in self._leased.intersection(leases.stopped):
            await self.cancel(response_id)
        for response_id, holder in leases.taken:
            if response_id not in self._jobs:
                self._leased.add(response_id)
                self._jobs[response_id] = asyncio.create_task(self._take_over(response_id, holder))

    async def _take_over(self, response_id: str, holder: str) -> None:
        """Continue a response of a gateway that died or shut down."""
        try:
            with self._capacity.occupy():
                found = await self._streams.find(response_id)
                if found is None:
                    await self._give_up(response_id, holder)
                else:
                    await self._continue(response_id, holder, resume.decode(found))
        except Refusal as refusal:  # Redis is away, or this gateway is full: the lease lapses again
            log.warning("the background response %s cannot be taken over now: %s", response_id, refusal.message)
        except BusDown as error:
            log.warning("the background response %s cannot be taken over now: %s", response_id, error)
        finally:
            self._forget(response_id)

    async def _continue(self, response_id: str, holder: str, record: resume.Record) -> None:
        form = record.form(response_id, self._tokenizer.vocabulary.table, ids=False)
        assert isinstance(form, ResponseFormat)
        meter = Meter(self._telemetry, time.monotonic())
        left_s = max(0.0, (record.deadline_ms - self._streams.redis_ms()) / 1000)
        status = 503
        try:
            async with self._streams.join([f"{response_id}.0"], [[0]], record.tenant, left_s) as opened:
                log.info("took over the background response %s", response_id)
                meter.resume(response_id, record.valid, 1, record.tenant, record.context)
                status = await self._answer(Job(response_id, holder, record.valid, form, meter), opened)
        except Refusal as refusal:
            if refusal.code != "stream_gone":
                raise
            await self._give_up(response_id, holder)
        finally:
            meter.close(ENDPOINT, status)

    async def _give_up(self, response_id: str, holder: str) -> None:
        """Store a response as failed: its gateway ended, and its token log has expired."""
        stored = await self._stored.load(holder, response_id)
        error = {"code": "server_error", "message": "the gateway that answered it ended, and its tokens are not kept"}
        response = {**msgspec.json.decode(stored.body), "status": "failed", "error": error}
        await self._stored.update(holder, response, ended=True)
        log.error("the background response %s failed: its gateway ended, and its tokens are not kept", response_id)
