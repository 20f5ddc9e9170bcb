"""Will it fit? Planned before, probed during, explained after."""
