"""The methods, one small file each."""

from fedhassle.method import Method
from fedhassle.methods.central import Central
from fedhassle.methods.central_fixmatch import CentralFixMatch
from fedhassle.methods.fedavg import FedAvg
from fedhassle.methods.fedmatch import FedMatch
from fedhassle.methods.fedprox import FedProx
from fedhassle.methods.fixmatch import FixMatch
from fedhassle.methods.fixmatch_global import FixMatchGlobal
from fedhassle.methods.hassle import Hassle
from fedhassle.methods.hassle_plus import HasslePlus
from fedhassle.methods.local_only import Alone
from fedhassle.methods.mixmatch import MixMatch
from fedhassle.methods.rscfed import RSCFed
from fedhassle.methods.sage import Sage

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "mixmatch": MixMatch,
    "fixmatch": FixMatch,
    "fedmatch": FedMatch,
    "rscfed": RSCFed,
    "hassle": Hassle,
    "hassle+": HasslePlus,
    "fixmatch-global": FixMatchGlobal,
    "sage": Sage,
    "central": Central,
    "central-fixmatch": CentralFixMatch,
    "local": Alone,
}
