"""Draw the graph that autograd records: draw_graph for a small expression, draw_model for the loss of a GPT-2."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch

from gpt2core.tensor import reachable
from walkthrough.setup import show

LEAF, RESULT, OPERATION = "#fde9c8", "#d7ead3", "#d6e4f5"


def operation(node):
    """The name of the function in which a node was made, such as "multiply"."""
    return node.backward.__qualname__.split(".")[0]


def parents(node):
    """The nodes and leaves that a node uses, one for each use."""
    return [parent.node or parent for parent in node.parents if parent is not None]


def nodes_and_leaves(root):
    """(the nodes that computed `root`, the leaves that they use), both in the order of their first use."""
    nodes = reachable(root)
    known = set(nodes)
    return nodes, list(dict.fromkeys(parent for node in nodes for parent in parents(node) if parent not in known))


def edges(node):
    """The outputs of other nodes that a node uses, without leaves."""
    return [parent for parent in node.parents if parent is not None and parent.node]


# -- a small expression ------------------------------------------------------------------------------------------------


def draw_graph(root, names, alt):
    """Draw the graph of `root`, from the leaves on the left to the root on the right.

    Call it before backward(), or after backward(retain_graph=True), because backward() frees the graph. names: {text:
    tensor}. A tensor with a name shows its data and, after backward(), its gradient. alt: see show().
    """
    nodes, leaves = nodes_and_leaves(root)
    gradients = inner_gradients(root) if any(leaf.grad is not None for leaf in leaves) else {}
    of_tensor = {tensor.node or tensor: (text, tensor) for text, tensor in names.items()}
    column = columns(nodes, leaves)
    order = [tensor for tensor in names.values() if tensor in leaves]  # the boxes of leaves have the order of the names
    position = positions(nodes, [*order, *(leaf for leaf in leaves if leaf not in order)], column)
    width, height = (1 + max(xy[axis] for xy in position.values()) for axis in (0, 1))
    _, axes = plt.subplots(figsize=(1.9 * width, 0.95 * height))
    boxes = {item: box(axes, xy, *label(item, of_tensor.get(item), gradients)) for item, xy in position.items()}
    for node in nodes:
        for use, parent in enumerate(parents(node)):
            repeated = parents(node)[:use].count(parent)
            ends = {"patchA": boxes[parent], "patchB": boxes[node]}
            arrow(axes, position[parent], position[node], bend=0.25 * repeated, **ends)
    axes.set_xlim(-0.6, width - 0.4)
    axes.set_ylim(height - 0.4, -0.6)
    axes.axis("off")
    show(alt)


def inner_gradients(root):
    """{node: gradient of its output}, by the chain rule; only for operations with one output."""
    gradients = {root.node: np.ones(root.shape)}
    for node in reversed(reachable(root)):  # newest first: all uses of its output have been processed
        for parent, gradient in zip(node.parents, node.backward(gradients[node]), strict=True):
            if parent is not None and parent.node:
                gradients[parent.node] = gradients.get(parent.node, 0) + gradient
    return gradients


def label(item, named, gradients):
    """(text, colour) of the box of a node or leaf; named: (name, tensor) or None; gradients: {node: gradient}."""
    is_leaf = not hasattr(item, "order")
    lines = [] if is_leaf else [operation(item)]
    if named:
        name, tensor = named
        lines.append(f"{name} = {short(tensor.data)}")
        gradient = tensor.grad if is_leaf else gradients.get(item)
        if gradient is not None:
            lines.append(f"grad {short(gradient)}")
    elif is_leaf:
        lines.append(short(item.data))
    return "\n".join(lines), LEAF if is_leaf else RESULT if named else OPERATION


def short(array):
    """An array of up to three numbers as text, otherwise its shape."""
    if array.size > 3:
        return str(array.shape)
    return np.array2string(np.asarray(array), formatter={"float": number})


def number(value):
    """A number with up to three digits after the point, and at least one: 2.0, -0.12, 0.707."""
    return str(round(float(value), 3) + 0.0)  # + 0.0 changes -0.0 to 0.0


def columns(nodes, leaves):
    """{node or leaf: column}: a node is right of all its parents, and a leaf is left of its first use."""
    column = {}
    for node in nodes:  # oldest first: the parents of a node have a column
        column[node] = 1 + max([column[parent] for parent in parents(node) if parent in column], default=0)
    for leaf in leaves:
        column[leaf] = min(column[node] for node in nodes if leaf in parents(node)) - 1
    return column


def positions(nodes, leaves, column):
    """{node or leaf: (x, y)}. In each column the boxes have the order of their neighbours in the next column."""
    users = {item: [node for node in nodes if item in parents(node)] for item in [*nodes, *leaves]}
    y, rows = {}, max(list(column.values()).count(number) for number in set(column.values()))
    for number in sorted(set(column.values()), reverse=True):
        items = [item for item in users if column[item] == number]
        items.sort(key=lambda item: np.mean([y[user] for user in users[item]] or [0]))
        for row, item in enumerate(items):
            y[item] = row + (rows - len(items)) / 2
    return {item: (column[item], y[item]) for item in users}


# -- a whole model -----------------------------------------------------------------------------------------------------


def draw_model(loss, parameters, alt):
    """Draw the graph of a model's loss from top to bottom; parameters: {name: leaf}. Call it before backward().

    An operation shows the shape of its first output; the boxes on the left are its parameters. alt: see show().
    """
    nodes = reachable(loss)
    row = {node: number for number, node in enumerate(nodes)}
    shape = {edge.node: edge.shape for node in nodes for edge in edges(node) if edge.index == 0}
    shape |= {edge.node: edge.shape for node in nodes for edge in edges(node) if edge.node not in shape}
    names = {leaf: name.removeprefix("transformer.") for name, leaf in parameters.items()}
    _, axes = plt.subplots(figsize=(8.5, 0.42 * len(nodes) + 0.8))
    boxes = {}
    for node in nodes:
        result = shape.get(node, loss.shape)
        colour = RESULT if node is loss.node else OPERATION
        boxes[node] = box(axes, (0, row[node]), f"{operation(node)}  {result}", colour)
        used = [f"{names[leaf]} {leaf.shape}" for leaf in parents(node) if leaf in names]
        for line, text in enumerate(used):
            y = row[node] + 0.34 * (line - (len(used) - 1) / 2) * (0.8 if len(used) > 2 else 1)
            axes.text(-1.15, y, text, ha="right", va="center", fontsize=7.5, color="#7a5a10")
        if used:
            arrow(axes, (-1.12, row[node]), (0, row[node]), patchB=boxes[node])
        for parent in {parent for parent in parents(node) if parent in row}:
            distance = row[node] - row[parent]
            if distance == 1:
                colour = "tab:red" if operation(parent) == "embedding" else "#555555"
                arrow(axes, (0, row[parent] + 0.25), (0, row[node] - 0.25), colour=colour)
            else:
                arrow(axes, (0.62, row[parent]), (0.62, row[node]), bend=-0.45, colour="tab:red")
    axes.set_xlim(-2.6, 2.2)
    tokens = box(axes, (0, -1), f"tokens  {shape[nodes[0]][:2]}", LEAF)
    arrow(axes, (0, -1), (0, 0), patchA=tokens, patchB=boxes[nodes[0]])
    axes.set_ylim(len(nodes) - 0.4, -1.6)
    axes.axis("off")
    show(alt)


# -- shapes ------------------------------------------------------------------------------------------------------------


def box(axes, xy, text, colour):
    """Draw text in a box; returns the patch of the box, at which arrows can end."""
    style = {"boxstyle": "round,pad=0.3", "facecolor": colour, "edgecolor": "#666666", "linewidth": 0.8}
    return axes.text(*xy, text, ha="center", va="center", fontsize=9, bbox=style, zorder=2).get_bbox_patch()


def arrow(axes, start, end, bend=0.0, colour="#555555", **ends):
    """ends: patchA and patchB, the boxes between which the arrow is drawn."""
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 2, "shrinkB": 2, "color": colour}
    # drawn after the boxes (zorder 2), whose sizes are known only then
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", zorder=3, **style, **ends))
