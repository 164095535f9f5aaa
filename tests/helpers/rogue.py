"""A node that misbehaves as told by a file beside its memory, {round: what}; without one it behaves.

In a round under masks the key is "round step".
"""

import json
import sys
import time

import numpy as np

from fedhassle.federation.messages import Payload
from fedhassle.federation.site import supernode, worker
from fedhassle.federation.site.node import SiteNode

honest, fair = SiteNode.train, SiteNode.evaluate


def orders_of(self):
    orders = self.memory.parent / f"{self.name}.rogue"
    return json.loads(orders.read_text()) if orders.exists() else {}


def evaluate(self, payload):
    answer, told = fair(self, payload), orders_of(self).get("evaluate")
    if told == "billions":
        return Payload({"right": dict.fromkeys(answer.words["right"], 10**12), "count": 10**12})
    if told == "alone":  # of a prediction that only this node knows
        return Payload({**answer.words, "right": {"mine": answer.words["count"]}})
    return answer


def train(self, payload):
    told = orders_of(self)
    when = [payload.words["round"], *filter(None, [payload.words.get("step")])]
    what = told.get(" ".join(map(str, when)))
    if what == "sleep":
        (self.memory.parent / f"{self.name}.asleep").touch()
        time.sleep(300)
    if what == "raise":
        raise MemoryError("no memory left")
    if what == "plan":  # what a server asks for that has not agreed to it
        gradient = {**payload.words["method"], "batch": 65_536, "lr": 1.0, "momentum": 0.0}
        payload = payload._replace(words={**payload.words, "method": gradient})
    if what == "path":
        (self.memory / "no such folder" / "Miller, John.png").read_bytes()
    answer = honest(self, payload)
    if what == "nan":
        return Payload(answer.words, {k: v * np.float32("nan") for k, v in answer.arrays.items()})
    if what == "names":
        return Payload(answer.words, {f"{k}'": v for k, v in answer.arrays.items()})
    if what == "huge":
        return Payload(answer.words, {k: np.full_like(v, 3e38) for k, v in answer.arrays.items()})
    if what == "thousandfold":
        return Payload(answer.words, {k: v * np.float32(1000) for k, v in answer.arrays.items()})
    if what == "fifteenfold":
        return Payload(answer.words, {k: v * np.float32(15) for k, v in answer.arrays.items()})
    if what == "opposite":  # small enough for bounds that are off
        return Payload(answer.words, {k: v * np.float32(-20) for k, v in answer.arrays.items()})
    if what == "shapes":
        return Payload(answer.words, {k: v[:-1] for k, v in answer.arrays.items()})
    return answer


if __name__ == "__main__":
    if "--parent-pid" in sys.argv:
        SiteNode.train, SiteNode.evaluate = train, evaluate
        sys.exit(worker.main())
    supernode.WORKER = "rogue"
    supernode.main()
