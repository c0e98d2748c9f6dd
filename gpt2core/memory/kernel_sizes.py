"""How many numbers the kernels read and write that are not products, as the planner and its calibration count them."""

UPDATE = 8  # of clipping and AdamW, for each parameter: g; p, m, v, g; p, m, v
ADD = 3  # of a sum of gradients, for each parameter
# Times C, of a block for each token in forward; in backward twice as many
NORMS = 2 * 4  # each of two LayerNorms reads x and a branch, and writes x and y; every rank of a tensor group does
GELU = 2 * 4  # it reads and writes the hidden layer, which the tensor group divides
LOGITS = 4  # times V, of the head: the exponentials of the logits, and their sums
