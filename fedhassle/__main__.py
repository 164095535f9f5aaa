"""`python -m fedhassle`."""

from fedhassle.cli.main import main

main()
