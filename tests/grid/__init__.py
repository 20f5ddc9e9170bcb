"""Engine x technique: cases that run in one process group per engine, and the one-process reference they must equal."""
