"""Settings: every setting of the two commands, once; the sources of their values; the settings of a run."""
