"""`make report`: measure what this machine can run, and write one HTML page beside the figures of the paper."""
