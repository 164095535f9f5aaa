"""The federation protocol of `engine.rounds`, implemented over a network of sites."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedhassle.engine.client import samples_by_name
from fedhassle.engine.client_state import ClientState
from fedhassle.engine.privacy.account import Guarantee, is_noisy
from fedhassle.engine.rounds import Averages, Reply
from fedhassle.engine.transfer import HELD, Arrived, Transfer, sent
from fedhassle.errors import UserError
from fedhassle.federation.figures import figures_of_site, read_figures
from fedhassle.federation.masks.contribution import MaskTerms
from fedhassle.federation.masks.protocol import LEAST_SITES
from fedhassle.federation.masks.words import REVEAL
from fedhassle.federation.messages import Failure, Hits, Payload, RefusedError, packed, read_hits, read_update
from fedhassle.federation.server.bounds import Bounded, Changes, bounded, with_capped_weights
from fedhassle.federation.server.masked import MaskedRound
from fedhassle.federation.server.sites import Answers, Sites
from fedhassle.method import Client, Method, Update
from fedhassle.nets import CPU
from fedhassle.predict.scores import wilson
from fedhassle.runs.record import Evaluation
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

MOST_REPEATS = 3  # times that a round waits for sites that it needs, and asks them again


class FlowerFederation:
    """Sites that train on their own machines; an error at one site costs the round that site only."""

    def __init__(
        self,
        sites: Sites,
        plan: Mapping[str, Any],
        memory: ClientState | None = None,
        terms: MaskTerms | None = None,
        privacy: Guarantee | None = None,
    ) -> None:
        self.sites, self.plan, self.audit = sites, dict(plan), sites.audit
        self.terms = terms  # of masks, if there are any
        # With noise, neither one site's update nor what sites find of a model may decide what is merged.
        without = replace(sites.rules, clip_above=0, refuse_above=0, worst_drop=1.0)
        self.rules = without if is_noisy(privacy) else sites.rules
        self.memory = ClientState() if memory is None else memory
        self.transfer = Transfer(self.memory, CPU)
        self._merged: dict[str, int] = {}  # by site: the last round in which its update was merged
        self._changes: dict[str, list[Changes]] = {}  # by site: of the rounds in which its update was merged
        self._checkpoints: list[int] = []

    def present(self) -> list[Client]:
        """The sites that are online and free, sorted by name; waits until there are enough."""
        fewest = LEAST_SITES if self.terms is not None else 1
        found = self.sites.gather(max(self.sites.rules.minimum_sites, fewest))
        return [found[name].client for name in sorted(found)]

    def train(
        self, method: Method, messages: Sequence[tuple[Client, Arrays]], t: int
    ) -> list[Reply] | Averages:
        """Trains round t at the sites; returns the replies of those that answered correctly, or their sum."""
        if self.terms is not None:
            return self._train_masked(self.terms, method, messages, t)
        least = method.unsent()
        known = {client.name: self.transfer.known(client.name, least, t) for client, _ in messages}
        down = {client.name: sent(message, known[client.name], least) for client, message in messages}
        payloads = {name: self._payload(name, down[name], known[name], t) for name in down}
        clients = {client.name: client for client, _ in messages}
        answers = self._answers(payloads, clients, t)
        updates: dict[str, Update] = {}
        failed: dict[str, str] = {}
        for name, client in clients.items():
            try:
                updates[name] = self._update(method, client, down[name], answers[name], t)
            except RefusedError as refused:
                failed[name] = str(refused)
        arrived = {name: message.arrays for name, message in down.items()}
        found = bounded(method, updates, arrived, self._changes, self.rules)
        failed |= found.refused
        self._record(found, failed, t)
        replies = self._replies(method, found, updates, down, t)
        self._require_enough([reply.update.client for reply in replies], clients, failed, t)
        return replies

    def _require_enough(
        self, answered: Sequence[Client], asked: Mapping[str, Client], failed: Mapping[str, str], t: int
    ) -> None:
        """Raises if fewer sites answered correctly than the rules demand, or a required one did not."""
        short = self._short_of(answered, asked)
        if short:
            said = "; ".join(f"{name}: {why}" for name, why in failed.items())
            raise UserError(
                f"round {t}: {short} ({said}); earlier rounds are saved: fix this and resume the run"
            )

    def _train_masked(
        self, terms: MaskTerms, method: Method, messages: Sequence[tuple[Client, Arrays]], t: int
    ) -> Averages:
        """Trains round t under masks; returns the mean of those that answered correctly."""
        clients = [client for client, _ in messages]
        asked = {client.name: client for client in clients}
        start = {name: vector for _, message in messages for name, vector in message.items()}
        training = {
            client.name: self._payload(client.name, Arrived(message, 0), {}, t)
            for client, message in messages
        }

        def ask(payloads: Mapping[str, Payload]) -> Answers:
            if any(payload.words["step"] == REVEAL for payload in payloads.values()):
                # Before the sum is known: too few now and more of them later would show what those sent.
                self._require_enough([asked[name] for name in payloads], asked, going.failed, t)
                self.audit.write("unmasking", round=t)  # the sum is known from now on, whatever comes of it
            return self.sites.ask("train", payloads, f"round {t}")

        going = MaskedRound(ask, terms, self.plan, t)
        try:
            done = going.run(method, clients, training, start, self.rules.largest_share)
        except RefusedError as refused:
            said = "; ".join([str(refused), *(f"{name}: {why}" for name, why in going.failed.items())])
            raise UserError(
                f"round {t}: {said}; earlier rounds are saved: fix this and resume the run"
            ) from refused
        self._merged |= dict.fromkeys(done.contributed, t)
        unknown: dict[str, Changes] = {name: {} for name in done.contributed}  # what each of them changed
        self._record(Bounded({}, unknown, {}, {}), done.failed, t)
        replies = tuple(
            Reply(
                Update(client, {}, samples_by_name(method.phases(client, t), client), {}),
                *(done.down[client.name], done.up[client.name]),
            )
            for client in clients
            if client.name in done.contributed
        )
        mean = Update(Client("sum", 0, 0), done.means, dict.fromkeys(done.means, 1), {})
        return Averages(replies, (True,) * len(replies), (mean,))

    def _answers(self, payloads: Mapping[str, Payload], clients: Mapping[str, Client], t: int) -> Answers:
        """The answers of the sites; if the round needs one that was lost, it waits and asks again."""
        answers = self.sites.ask("train", payloads, f"round {t}")
        for _ in range(MOST_REPEATS):
            silent = [name for name, answer in answers.items() if isinstance(answer, Failure) and answer.gone]
            if not silent or not self._short_of(
                [clients[name] for name in clients if not isinstance(answers[name], Failure)], clients
            ):
                break
            there = self.sites.gather(self.sites.rules.minimum_sites)
            again = {name: payloads[name] for name in silent if name in there}
            log.warning("round %d needs %s: asking again", t, ", ".join(again) or "more sites")
            answers |= self.sites.ask("train", again, f"round {t}")
        return answers

    def _short_of(self, answered: Sequence[Client], asked: Mapping[str, Client]) -> str:
        """Returns in words what a round with these answers lacks; empty if it can be completed."""
        needed, required = min(self.sites.rules.minimum_sites, len(asked)), self.sites.required
        if len(answered) < needed:
            return f"{len(answered)} of at least {needed} sites answered correctly"
        idle = required.lacking(asked.values())  # the method has no work for them
        missing = [words for words in required.lacking(answered) if words not in idle]
        return f"required and missing: {', '.join(missing)}" if missing else ""

    def _payload(self, name: str, message: Arrived, known: Arrays, t: int) -> Payload:
        """The message to a site: the vectors, and the round of its own that it continues from."""
        words = {
            **self.plan,
            "round": t,
            "since": self._merged.get(name, 0),
            "checkpoints": self._checkpoints,
        }
        return Payload(words, packed(message.arrays, known))

    def _update(
        self, method: Method, client: Client, down: Arrived, answer: Payload | Failure, t: int
    ) -> Update:
        """Reads a site's answer; raises if it is a failure or malformed."""
        if isinstance(answer, Failure):
            if answer.lost:  # it starts afresh in the next round
                self._merged.pop(client.name, None)
                self.memory.forget(HELD + client.name)
            raise RefusedError(answer.why)
        return read_update(answer, method, client, down.arrays, t)

    def _replies(
        self, method: Method, found: Bounded, updates: dict[str, Update], down: dict[str, Arrived], t: int
    ) -> list[Reply]:
        """The replies as they are merged; remembers what each site holds, which is what it sent."""
        share = self.sites.rules.largest_share
        replies = []
        for update in with_capped_weights(method, list(found.updates.values()), share, t):
            name = update.client.name
            up = self.transfer.up(name, updates[name].arrays, down[name].arrays, method.unsent(), t)
            self._merged[name] = t
            self._changes.setdefault(name, []).append(found.changes[name])
            replies.append(Reply(update, down[name].size, up.size))
        return replies

    def _record(self, found: Bounded, failed: Mapping[str, str], t: int) -> None:
        """Logs the sites that contributed to a round, and those that failed or were clipped, and why."""
        for name, why in failed.items():
            log.warning("round %d continues without %s: %s", t, name, why)
            self.audit.write("failed", site=name, round=t, why=why)
        for name, what in found.clipped.items():
            log.warning("round %d: the update of %s is clipped: %s (rules.clip_above)", t, name, what)
            self.audit.write("clipped", site=name, round=t, what=what)
        merged = {"contributed": list(found.changes), "failed": list(failed), "changes": found.changes}
        self.audit.write("round", round=t, **merged)

    def evaluate(self, method: Method, state: Arrays, t: int) -> Evaluation | None:
        """Accuracy on the sites' validation images, overall and by site; None if no site answers."""
        there = self.sites.free
        able = [name for name, said in there.items() if said.validation]
        model = method.model(state)
        payload = Payload({**self.plan, "round": t}, packed(model, {}))
        answers = self.sites.ask("evaluate", dict.fromkeys(able, payload), f"round {t}")
        images = {name: said.validation for name, said in there.items()}
        found = self._hits(answers, images, predictions_of(method, model), t)
        if not found:
            log.warning("round %d: no site could evaluate the model", t)
            return None
        figures = self._figures(answers, found, t)
        self.audit.write("evaluated", round=t, sites=list(found))
        more = {"sites": {name: site_entry(method, hits) | figures[name] for name, hits in found.items()}}
        return Evaluation(accuracy(method, list(found.values())), more)

    def _figures(self, answers: Answers, found: Mapping[str, Hits], t: int) -> dict[str, dict[str, Any]]:
        """The sites' figures by class, as far as they are agreed; logs those that are not as agreed."""
        made: dict[str, dict[str, Any]] = {}
        names = self.sites.figures_of
        for name, hits in found.items():
            answer, made[name] = answers[name], {}
            try:
                if names and isinstance(answer, Payload):
                    said = read_figures(answer.words.get("figures"), names, hits.images)
                    made[name] = figures_of_site(said, names)
            except RefusedError as refused:
                log.warning("round %d: the figures of %s do not count: %s", t, name, refused)
                self.audit.write("failed", site=name, round=t, why=f"figures: {refused}")
        return made

    def _hits(
        self, answers: Answers, images: Mapping[str, int], predictions: Collection[str], t: int
    ) -> dict[str, Hits]:
        """The hits by site, if it answered correctly; logs the others."""
        found: dict[str, Hits] = {}
        for name, answer in answers.items():
            try:
                if isinstance(answer, Failure):
                    raise RefusedError(answer.why)
                found[name] = read_hits(answer.words, images[name], predictions)
            except RefusedError as refused:
                log.warning("round %d is evaluated without %s: %s", t, name, refused)
                self.audit.write("failed", site=name, round=t, why=f"evaluation: {refused}")
        return found

    def rewind(self, t: int) -> None:
        """Goes back to round t; sites forget what they kept later, with their next message."""
        self.memory.rewind(self.audit.taken_in(t))
        self.audit.write("resumed" if t else "begun", round=t)
        self._merged, self._changes = self.audit.contributions(t), self.audit.changes(t)
        self._checkpoints = [t]

    def prune(self, rounds: Sequence[int]) -> None:
        """Lets sites forget what is not needed to continue from now or from one of these rounds."""
        self.memory.prune(rounds)
        self._checkpoints = list(rounds)

    def kept(self) -> dict[str, int]:
        """Nothing: a site whose state is lost says so, and starts afresh."""
        return {}


def predictions_of(method: Method, model: Arrays) -> list[str]:
    """The names of the predictions that a model makes, tried on blank images: no site decides them."""
    with torch.no_grad():
        return list(method.predict(model, torch.zeros(2, *method.net.shape)))


def site_entry(method: Method, hits: Hits) -> dict[str, Any]:
    """A site's entry in a line of metrics: its accuracy, with a 95 % interval of the headline's.

    If the site knows its patients, the interval is by patient: of as many images as they are worth.
    """
    found = accuracy(method, [hits])
    interval = wilson(round(found[method.headline] * hits.images), hits.images, hits.effective)
    worth = {} if hits.effective is None else {"effective": hits.effective}
    return {"accuracy": found, "count": hits.images, **worth, "accuracy_95": list(interval)}


def accuracy(method: Method, hits: Sequence[Hits]) -> dict[str, float]:
    """The accuracy of each prediction over the images of several sites."""
    total = sum(hit.images for hit in hits)
    right = {name: sum(hit.right[name] for hit in hits) for name in hits[0].right}
    return method.report({name: n / total for name, n in right.items()})
