"""How a row runs: the device as a row sees it, its child processes, its named checks and its seeded faults.

    row         what a test is given: starts children, judges by named checks
    child       which process runs what, and how it ended
    port        inside a child: sizes, tolerances, three instruments, lag
    checks      a named check with what was expected, what was got, and the tolerance
    faults      which fault must turn which check of a row red
    exclusive   whether somebody else is on the device

Nothing here imports torch.
"""
