"""Plots of runs: python -m nanope.plots out/a out/b overlays their loss curves into loss.png, or --to=FILE.png."""
import os
import sys
from statistics import fmean

from nanope import metrics
from nanope.configurator import run
from nanope.files import make_folder

COLOURS = {'learned': '#0072B2', 'sinusoidal': '#D55E00', 'rope': '#009E73', 'none': '#6B6B6B', 'alibi': '#AA4499'}  # for all eyes
OTHERS = '#E69F00', '#56B4E9', '#882255', '#332288', '#999933'  # for runs whose scheme is not known
LINES = '-', '--', ':', '-.', (0, (5, 1, 1, 1, 1, 1)), (0, (9, 2))
SHADES = 0.0, 0.45, -0.4  # towards white, towards black
ROOM = 1.0  # nats above the lowest loss that a picture shows at most: past the trained length some schemes lose all sight of the rest


def figure(columns=1):
    """A matplotlib figure and its axes side by side, drawn without a display."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(5.2 if columns == 1 else 4.5 * columns, 3.8), layout='constrained')
    panels = fig.subplots(1, columns, squeeze=False)[0]
    for axes in panels:
        axes.grid(color='#e8e8e8')
        axes.set_axisbelow(True)
        axes.spines[['top', 'right']].set_visible(False)
    return fig, panels


def styles(schemes):
    """Colour and line of each: the colour is the scheme's; the line, then the shade, tell its extensions and settings apart.

    schemes: [(scheme, name), ...]; a tuned extension, which has a panel of its own, looks as the one that it was made of."""
    from matplotlib.colors import to_hex, to_rgb
    found, seen = [], {}
    for wpe, name in schemes:
        names = seen.setdefault(wpe, {})
        n = names.setdefault(name.removesuffix(', tuned'), len(names))
        shade = SHADES[n // len(LINES) % len(SHADES)]
        mixed = [(1 - abs(shade)) * part + max(shade, 0) for part in to_rgb(COLOURS.get(wpe) or OTHERS[n % len(OTHERS)])]
        found.append({'color': to_hex(mixed).upper(), 'linestyle': LINES[n % len(LINES)]})
    return found


def title(axes, text, note):
    axes.set_title(text, loc='left', fontweight='bold', fontsize=11, pad=20, parse_math=False)
    axes.text(0, 1.025, note, transform=axes.transAxes, color='#666666', fontsize=9)


def short(text):
    return text if len(text) <= 28 else text[:13] + '…' + text[-14:]


def label_ends(axes, ends):
    """Write beside the right end of each curve what it is, in its colour; texts are moved apart. ends: [(x, y, text, style)]."""
    bottom, top = axes.get_ylim()
    share = min(0.068, 1 / (len(ends) + 1))                       # of the height a label; many are smaller
    ends, gap = sorted(ends, key=lambda end: end[1]), share * (top - bottom)
    stacks = []                                                   # of labels that touch; each: where its labels would have its lowest
    for i, (_, y, *_) in enumerate(ends):
        stacks.append([min(max(y, bottom), top) - i * gap])
        while len(stacks) > 1 and fmean(stacks[-2]) > fmean(stacks[-1]):
            stacks[-2:] = [stacks[-2] + stacks[-1]]
    lowest = [min(max(fmean(stack), bottom + gap / 2), top + gap / 2 - len(ends) * gap) for stack in stacks for _ in stack]
    for i, ((x, y, text, style), low) in enumerate(zip(ends, lowest)):
        axes.annotate(short(text), (x, min(y, top)), (1.04, low + i * gap), textcoords=axes.get_yaxis_transform(), va='center',
                      color=style['color'], fontsize=10 * share / 0.068, parse_math=False,
                      arrowprops={'arrowstyle': '-', 'color': style['color'], 'linewidth': 0.6, 'relpos': (0, 0.5), 'shrinkA': 0})


# ---- panels: each draws one thing into given axes --------------------------------------------------------------------

def draw_loss_curves(axes, groups, look):
    """Validation loss of run folders over updates (dots), one colour a group, and training loss (thin) where a group is a single run.

    groups: {label: [run folder, ...]}; of several runs the mean is drawn thick, each of them thin. look: see styles()."""
    ends, drawn = [], []  # drawn: every (step, loss)
    for (label, runs), style in zip(groups.items(), look):
        curves = []
        for run in runs:
            records = metrics.read(run)
            train = [(r['step'], r['loss']) for r in records if r['event'] == 'train']
            curves.append({r['step']: (r['loss'], r['stderr']) for r in records if r['event'] == 'eval'})
            thin = train if len(runs) == 1 else [(step, loss) for step, (loss, _) in curves[-1].items()]
            axes.plot([step for step, _ in thin], [loss for _, loss in thin], **style, alpha=0.35, linewidth=0.8)
            drawn += thin
        steps = [step for step in curves[0] if all(step in curve for curve in curves)]
        if steps:
            losses = [sum(curve[step][0] for curve in curves) / len(curves) for step in steps]
            stderrs = [curves[0][step][1] for step in steps] if len(curves) == 1 else None
            axes.errorbar(steps, losses, yerr=stderrs, **style, marker='o', markersize=3.5, linewidth=1.4)
            ends.append((steps[-1], losses[-1], label if len(groups) > 1 else f'{losses[-1]:.3f}', style))
            drawn += zip(steps, losses)
    title(axes, 'Loss while training' + (f': {next(iter(groups))}' if len(groups) == 1 else ''),
          'nats a token; dots: validation, thin: ' + ('training' if all(len(runs) == 1 for runs in groups.values()) else 'each seed'))
    axes.set_xlabel('updates')
    if drawn:  # the fall of the first tenth would leave no room for what differs between runs
        last = max(step for step, _ in drawn)
        settled = [loss for step, loss in drawn if step >= last / 10]
        margin = 0.05 * (max(settled) - min(settled)) or 0.1
        axes.set(xlim=(0, 1.02 * max(last, 1)), ylim=(min(settled) - margin, max(settled) + margin))
    label_ends(axes, ends)


def draw_by_length(axes, schemes, look, protocol, value, base, bars=True):
    """A protocol's value over tokens of context: mean over seeds with its 95 % interval, or a single run with its standard error.

    schemes: as in report.json. base: the trained length, a dotted line."""
    ends, drawn = [], []  # drawn: every (tokens, value, error)
    for scheme, style in zip(schemes, look):
        points = []
        for part in scheme[protocol]:
            mean, interval, stderr = (part[f'{value}_{what}'] for what in ('mean', 'ci95', 'stderr'))
            x = part['length'] if 'length' in part else ((part['from'] + 1) * part['to']) ** 0.5
            points += [(x, mean, (interval[1] - interval[0]) / 2 if interval else stderr or 0)] if mean is not None else []
        if points:
            x, y, error = zip(*points)
            axes.plot(x, y, **style, marker='o', markersize=3.5, linewidth=1.4)
            if bars:
                axes.errorbar(x, y, yerr=error, fmt='none', ecolor=style['color'], alpha=0.4, elinewidth=1.2)
            ends.append((x[-1], y[-1], scheme['scheme'].removesuffix(', tuned'), style))  # which the title says
            drawn += points
    if drawn:
        x, y, _ = zip(*drawn)
        ticks = [2 ** i for i in range(32) if min(x) / 1.5 <= 2 ** i <= 1.1 * max(x)]
        axes.set_xscale('log', base=2)
        axes.set_xticks(ticks, [f'{tick:,}' for tick in ticks])
        low, high = (min(y), min(max(y), min(y) + ROOM)) if value == 'loss' else (min(*y, 0), max(*y, 0.5))
        margin = 0.06 * (high - low) + 0.01
        axes.set(xlim=(min(x) / 1.1, 1.07 * max(x)), ylim=(low - margin, high + margin), xlabel='tokens of context')
    axes.axvline(base, color='#999999', linewidth=0.8, linestyle=':')
    for part in [part for scheme in schemes for part in scheme[protocol] if 'chance' in part][:1]:
        axes.axhline(part['chance'], color='#999999', linewidth=0.8, linestyle=':')
    label_ends(axes, ends)


def draw_differences(axes, schemes, look):
    """Validation loss less that of the reference, paired by seed: mean, its 95 % interval, and each seed as a dot."""
    for y, (scheme, style) in enumerate(zip(schemes, look)):
        found = scheme['difference'] or {'mean': 0, 'ci95': None, 'pairs': []}
        if found['mean'] is not None:
            seeds, colour = [pair['difference'] for pair in found['pairs']], style['color']
            axes.plot(found['ci95'] or [found['mean']] * 2, [y, y], color=colour, linewidth=2)
            axes.plot(seeds, [y] * len(seeds), 'o', color=colour, alpha=0.4, markersize=4)
            axes.plot(found['mean'], y, 'D', color=colour, markersize=6)
    names = [short(scheme['scheme']) for scheme in schemes]
    axes.set_yticks(range(len(schemes)), names, parse_math=False, fontsize=min(10, 180 / len(schemes)))
    axes.set(xlabel='nats a token; left of the line is better', ylim=(len(schemes) - 0.4, -0.6))
    axes.axvline(0, color='#444444', linewidth=0.8)
    axes.grid(axis='y', visible=False)


# ---- pictures --------------------------------------------------------------------------------------------------------

def loss_curves(runs, path):
    """Loss curves of run folders into a PNG."""
    fig, (axes,) = figure()
    groups = {name: [run] for name, run in zip(metrics.run_names(runs), runs)}
    draw_loss_curves(axes, groups, styles([(metrics.scheme_of(run), name) for name, (run,) in groups.items()]))
    fig.savefig(path, dpi=180)


def panels(report):
    """{name: function that draws it into axes} of what a report has to show. report: as in report.json."""
    look = list(zip(report['schemes'], styles([(scheme['wpe'], scheme['scheme']) for scheme in report['schemes']])))
    plain = [(scheme, style) for scheme, style in look if not scheme['extension']] or look
    extended = [(scheme, style) for scheme, style in look if (scheme, style) not in plain]
    seeds = '95 % over seeds' + ('' if all(scheme['n_seeds'] > 1 for scheme, _ in look) else '; of one seed, standard error')
    found, groups, base = {}, {scheme['scheme']: scheme['runs'] for scheme, _ in plain}, report['length']

    def add(name, which, draw, heading, note, *args):
        def panel(axes):
            draw(axes, *zip(*which), *args)
            title(axes, heading, note)
        found[name] = panel

    found['curves'] = lambda axes: draw_loss_curves(axes, groups, [style for _, style in plain])
    add('position', plain, draw_by_length, 'Loss by position', 'nats a token; dotted: trained length', 'position', 'loss', base, False)
    if look[0][0]['context']:
        note = f'nats a token; bars: {seeds}'
        add('context', plain, draw_by_length, 'Same targets, other contexts', note, 'context', 'loss', base)
        tuned = [(scheme, style) for scheme, style in extended if scheme['extension'].endswith('tuned')]
        at_once = [each for each in extended if each not in tuned]
        for name, which, heading in (('extended', at_once, 'The same, context extended'), ('tuned', tuned, 'The same, extended and tuned')):
            if which:
                add(name, which, draw_by_length, heading, note, 'context', 'loss', base)
    if len(look) > 1:
        heading = f'Validation loss minus {report["reference"]}'
        add('differences', look, draw_differences, heading, 'line: 95 % interval, dots: seeds')
    if look[0][0]['retrieval']:
        note = 'share answered rightly; dotted: chance'
        add('retrieval', plain, draw_by_length, 'Key-value retrieval', note, 'retrieval', 'accuracy', base)
        add('induction', plain, draw_by_length, 'Induction', 'nats gained from having seen the sequence', 'induction', 'score', base)
    return found


def comparison(report, path):
    """The panels on loss side by side into a PNG."""
    found = [draw for name, draw in panels(report).items() if name in ('curves', 'position', 'context', 'extended', 'tuned')]
    fig, axes = figure(len(found))
    for draw, each in zip(found, axes):
        draw(each)
    fig.savefig(path, dpi=180)


def main():
    runs = [arg for arg in sys.argv[1:] if not arg.startswith('--to=')]
    path = ([arg[5:] for arg in sys.argv[1:] if arg not in runs] or ['loss.png'])[-1]
    if {'-h', '--help'} & set(runs):
        return print('usage: python -m nanope.plots out/a out/b ... [--to=loss.png]')
    for each in [run for run in runs or [''] if not os.path.isfile(os.path.join(run, 'metrics.jsonl'))]:
        raise ValueError(f'{f"{each} holds no metrics.jsonl" if each else "give run folders"}: python -m nanope.plots out/a out/b ...')
    if os.path.isdir(path):
        raise ValueError(f'--to={path} is a folder: give a file, --to={os.path.join(path, "loss.png")}')
    make_folder(os.path.dirname(path) or '.')
    loss_curves(runs, path)
    print(f'wrote {path}: loss while training of {", ".join(metrics.run_names(runs))}')


if __name__ == '__main__':
    run(main)
