"""`python -m fedhassle`."""

from fedhassle.cli import main

main()
