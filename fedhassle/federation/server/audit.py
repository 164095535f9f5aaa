"""The audit log of a run: the sites that joined, left, failed, and contributed to each round."""

from __future__ import annotations

from fedhassle.federation.audit_log import AuditLog, Event

SERVER_ENDED, DISK_FULL = "the server's process has ended", "the server's disk is full: free some space"
ACCIDENTS = (SERVER_ENDED, DISK_FULL)  # why a run has stopped that the server resumes by itself
AGREED = "agreed_images"  # of a site that has joined: the most that it was admitted with
COUNTED = ("joined", "relabelled")  # events with the numbers of a site's images


class Audit(AuditLog):
    """The audit log of a run, and what the server reads from it."""

    def tested_on(self) -> str:
        """The path of the run's test images, as last given; empty if it has none."""
        return next((str(event["test"]) for event in reversed(self.read()) if event.get("test")), "")

    def contributors(self) -> dict[int, list[str]]:
        """The sites whose updates were merged, by round."""
        return {n: event["contributed"] for n, event in self._rounds().items()}

    def _rounds(self) -> dict[int, Event]:
        """The event of each round, as it was trained last."""
        merged: dict[int, Event] = {}
        for event in self.read():
            if event["event"] in ("begun", "resumed", "undone"):  # later rounds do not count
                last = event["to"] if event["event"] == "undone" else event["round"]
                merged = {n: known for n, known in merged.items() if n <= last}
            if event["event"] == "round":
                merged[event["round"]] = event
        return merged

    def rounds_trained(self) -> int:
        """The number of rounds that were merged or unmasked, with those that were repeated after a crash."""
        events = [event["event"] for event in self.read()]
        return max(events.count("round"), events.count("unmasking"))  # with masks, a round has both

    def changes(self, t: int) -> dict[str, list[dict[str, float]]]:
        """By site, the norms of its changes in the rounds up to t in which its update was merged."""
        found: dict[str, list[dict[str, float]]] = {}
        for n, event in sorted(self._rounds().items()):
            for name, changes in event.get("changes", {}).items() if n <= t else ():
                found.setdefault(name, []).append(changes)
        return found

    def taken_in(self, t: int) -> int:
        """The round whose state a run has after round t: an earlier one if the rounds since were undone."""
        undone: list[Event] = []
        for event in self.read():
            if event["event"] in ("begun", "resumed"):
                undone = [one for one in undone if one["round"] <= event["round"]]
            if event["event"] == "undone":
                undone.append(event)
        for event in reversed(undone):
            t = event["to"] if event["to"] < t <= event["round"] else t
        return t

    def contributions(self, t: int) -> dict[str, int]:
        """The last round up to t in which each site's update was merged."""
        merged = self.contributors()
        return {name: n for n in sorted(merged) if n <= t for name in merged[n]}
