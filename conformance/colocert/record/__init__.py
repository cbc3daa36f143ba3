"""Recording: scenarios and exploration, run in children of the suite's own, streamed to files. Judges nothing."""
