"""Plots of runs: python -m nanope.plots out/a out/b overlays their loss curves into loss.png."""
import os
import sys

from nanope import metrics


def figure(columns=1):
    """A matplotlib figure and its axes side by side, drawn without a display."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(7 * columns, 4.2), layout='constrained')
    panels = fig.subplots(1, columns, squeeze=False)[0]
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[['top', 'right']].set_visible(False)
    return fig, panels


def draw_loss_curves(axes, runs):
    """Training loss (thin) and validation loss with its standard error (dots) of run folders over updates."""
    for i, run in enumerate(runs):
        records = metrics.read(run)
        train = [(r['step'], r['loss']) for r in records if r['event'] == 'train']
        val = [(r['step'], r['loss'], r['stderr']) for r in records if r['event'] == 'eval']
        if train:
            axes.plot(*zip(*train), color=f'C{i}', alpha=0.35, linewidth=0.8)
        if val:
            steps, losses, stderrs = zip(*val)
            axes.errorbar(steps, losses, yerr=stderrs, color=f'C{i}', marker='o', markersize=3.5, linewidth=1.2,
                          label=os.path.basename(os.path.normpath(run)))
    axes.set(xlabel='updates', ylabel='loss, nats a token (dots: validation)')
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def draw_loss_by_position(axes, curves):
    """Mean validation loss at each position of a window. curves: name -> list of floats, position 0 first."""
    for name, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, label=name, linewidth=1.2)
    axes.set(xlabel='tokens of context', ylabel='validation loss, nats a token', xscale='log')
    axes.legend(frameon=False)


def loss_curves(runs, path):
    """Loss curves of run folders into a PNG."""
    fig, (axes,) = figure()
    draw_loss_curves(axes, runs)
    fig.savefig(path, dpi=120)


def comparison(runs, curves, path):
    """Loss curves of run folders and loss by position side by side into a PNG. curves: name -> list of floats."""
    fig, (left, right) = figure(columns=2)
    draw_loss_curves(left, runs)
    draw_loss_by_position(right, curves)
    fig.savefig(path, dpi=120)


if __name__ == '__main__':
    if len(sys.argv) < 2:
        sys.exit('usage: python -m nanope.plots out/a out/b ...   writes loss.png')
    loss_curves(sys.argv[1:], 'loss.png')
    print('wrote loss.png')
