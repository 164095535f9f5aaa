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

honest = SiteNode.train


def train(self, payload):
    orders = self.memory.parent / f"{self.name}.rogue"
    told = json.loads(orders.read_text()) if orders.exists() else {}
    when = [payload.words["round"], *filter(None, [payload.words.get("step")])]
    what = told.get(" ".join(map(str, when)))
    if what == "sleep":
        (self.memory.parent / f"{self.name}.asleep").touch()
        time.sleep(300)
    if what == "raise":
        raise MemoryError("no memory left")
    answer = honest(self, payload)
    if what == "nan":
        return Payload(answer.words, {k: v * np.float32("nan") for k, v in answer.arrays.items()})
    if what == "names":
        return Payload(answer.words, {f"{k}'": v for k, v in answer.arrays.items()})
    if what == "shapes":
        return Payload(answer.words, {k: v[:-1] for k, v in answer.arrays.items()})
    return answer


if __name__ == "__main__":
    if "--parent-pid" in sys.argv:
        SiteNode.train = train
        sys.exit(worker.main())
    supernode.WORKER = "rogue"
    supernode.main()
