"""One file for each kind of parallelism; each is the serial step with a tree, a hook or a group added."""
