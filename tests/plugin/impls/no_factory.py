"""Claims, and no factory."""

from small import Small


class NoFactory(Small):
    trainer = None


implementation = NoFactory()
