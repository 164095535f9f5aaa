"""The methods, one small file each."""

from fedhassle.method import Method
from fedhassle.methods.fedavg import FedAvg
from fedhassle.methods.fedprox import FedProx
from fedhassle.methods.hassle import Hassle

METHODS: dict[str, type[Method]] = {"fedavg": FedAvg, "fedprox": FedProx, "hassle": Hassle}
