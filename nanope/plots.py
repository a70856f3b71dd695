"""Plots of runs: python -m nanope.plots out/a out/b overlays their loss curves into loss.png."""
import os
import sys

from nanope import metrics

COLOURS = '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#555555'  # Okabe and Ito: all eyes tell them apart
LINES = '-', '--', ':'  # for the eighth run and the fifteenth


def run_names(runs):
    """What to call run folders: as many last parts of their paths as tell them apart, [str, ...]."""
    paths = [os.path.abspath(run).split(os.sep) for run in runs]
    for n in range(1, max(map(len, paths), default=0) + 1):
        names = ['/'.join(path[-n:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return list(runs)


def figure(columns=1):
    """A matplotlib figure and its axes side by side, drawn without a display."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(6 if columns == 1 else 4.5 * columns, 3.8), layout='constrained')
    panels = fig.subplots(1, columns, squeeze=False)[0]
    for axes in panels:
        axes.grid(color='#e8e8e8')
        axes.set_axisbelow(True)
        axes.spines[['top', 'right']].set_visible(False)
    return fig, panels


def style(i):
    return {'color': COLOURS[i % len(COLOURS)], 'linestyle': LINES[i // len(COLOURS) % len(LINES)]}


def title(axes, text, note):
    axes.set_title(text, loc='left', fontweight='bold', fontsize=11, pad=20, parse_math=False)
    axes.text(0, 1.025, note, transform=axes.transAxes, color='#666666', fontsize=9)


def label_ends(axes, ends):
    """Write beside the right end of each curve what it is, in its colour, moved apart where texts would overlap. ends: (x, y, text, i)."""
    bottom, top = axes.get_ylim()
    ends, gap = sorted(ends, key=lambda end: end[1]), 0.068 * (top - bottom)
    heights = [min(max(end[1], bottom), top) for end in ends]
    for _ in range(200):  # neighbours push each other apart until none touches, and off the axis below
        heights[:1] = [max(height, bottom + gap / 2) for height in heights[:1]]
        for low in range(len(ends) - 1):
            push = max(gap - (heights[low + 1] - heights[low]), 0) / 2
            heights[low], heights[low + 1] = heights[low] - push, heights[low + 1] + push
    for (x, y, text, i), height in zip(ends, heights):
        text = text if len(text) <= 28 else text[:13] + '…' + text[-14:]
        axes.annotate(text, (x, y), (1.04, height), textcoords=axes.get_yaxis_transform(), va='center', color=style(i)['color'],
                      arrowprops={'arrowstyle': '-', 'color': style(i)['color'], 'linewidth': 0.6}, parse_math=False)


def draw_loss_curves(axes, runs, names):
    """Training loss (thin) and validation loss with its standard error (dots) of run folders over updates."""
    ends, drawn = [], []  # drawn: every (step, loss)
    for i, (run, name) in enumerate(zip(runs, names)):
        records = metrics.read(run)
        train = [(r['step'], r['loss']) for r in records if r['event'] == 'train']
        val = [(r['step'], r['loss'], r['stderr']) for r in records if r['event'] == 'eval']
        if train:
            axes.plot(*zip(*train), **style(i), alpha=0.35, linewidth=0.8)
        if val:
            steps, losses, stderrs = zip(*val)
            axes.errorbar(steps, losses, yerr=stderrs, **style(i), marker='o', markersize=3.5, linewidth=1.4)
            ends.append((steps[-1], losses[-1], name if len(runs) > 1 else f'{losses[-1]:.3f}', i))
        drawn += [*zip(*zip(*train)), *zip(*list(zip(*val))[:2])]
    title(axes, 'Loss while training' + (f': {names[0]}' if len(runs) == 1 else ''), 'nats a token; dots: validation, thin: training')
    axes.set_xlabel('updates')
    if drawn:  # the fall of the first tenth would leave no room for what differs between runs
        last = max(step for step, _ in drawn)
        settled = [loss for step, loss in drawn if step >= last / 10]
        margin = 0.05 * (max(settled) - min(settled)) or 0.1
        axes.set(xlim=(0, 1.02 * max(last, 1)), ylim=(min(settled) - margin, max(settled) + margin))
    label_ends(axes, ends)


def buckets(n):
    """Ranges (first, last) of the positions 1..n, each about 1.4 times as far from the start as the one before."""
    edges = sorted({round(2 ** (i / 2)) for i in range(2 * n.bit_length())})
    edges = [edge for edge in edges if edge == 1 or edge < n / 1.2] + [n + 1]
    return [(low, high - 1) for low, high in zip(edges, edges[1:])]


def draw_loss_by_position(axes, curves, names):
    """Mean validation loss over how many tokens a prediction could see. curves: a list of floats a run, position 0 first.

    Neighbouring positions are averaged: single ones are too noisy to read."""
    ends = []
    for i, (losses, name) in enumerate(zip(curves, names)):
        ranges = buckets(len(losses))
        x = [(low * high) ** 0.5 for low, high in ranges]
        y = [sum(losses[low - 1:high]) / (high - low + 1) for low, high in ranges]
        axes.plot(x, y, **style(i), marker='o', markersize=3.5, linewidth=1.4)
        ends.append((x[-1], y[-1], name, i))
    longest = max(map(len, curves))
    axes.set_xscale('log', base=2)
    ticks = [2 ** i for i in range(longest.bit_length())]
    axes.set_xticks(ticks, [f'{tick:,}' for tick in ticks])
    axes.set(xlim=(0.9, 1.05 * max(longest, 2)), xlabel='tokens of context, the present one included')
    title(axes, 'Validation loss by context', 'nats a token; dots: means over neighbouring positions')
    label_ends(axes, ends)


def loss_curves(runs, path):
    """Loss curves of run folders into a PNG."""
    fig, (axes,) = figure()
    draw_loss_curves(axes, runs, run_names(runs))
    fig.savefig(path, dpi=180)


def comparison(runs, names, curves, path):
    """Loss curves of run folders and loss by position side by side into a PNG. curves: a list of floats a run."""
    fig, (left, right) = figure(columns=2)
    draw_loss_curves(left, runs, names)
    draw_loss_by_position(right, curves, names)
    fig.savefig(path, dpi=180)


if __name__ == '__main__':
    if len(sys.argv) < 2:
        sys.exit('usage: python -m nanope.plots out/a out/b ...   writes loss.png')
    loss_curves(sys.argv[1:], 'loss.png')
    print('wrote loss.png')
