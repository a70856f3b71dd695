"""How the measures of position tables are shown: as text and as a picture. See tables.py for what they are."""
import numpy as np

from nanope import tables

LABELS = {  # measure -> (what it is called, its format)
    'norm_row0': ('norm, row 0', '.3f'), 'norm_median': ('norm, median', '.3f'), 'norm_last': ('norm, last row', '.3f'),
    **{f'cosine_lag{lag}': (f'cosine of rows {lag} apart', '.3f') for lag in tables.LAGS},
    'step_ratio': ('step / step when shuffled', '.3f'), 'toeplitz': ('Toeplitz index', '.3f'),
    'pca_share1': ('variance in 1 component', '.1%'), 'pca_share4': ('variance in 4 components', '.1%'),
    'pca_share12': ('variance in 12 components', '.1%'), 'pca_k90': ('components for 90 %', 'd'),
    **{f'sinusoid_r2_pc{i}': (f'component {i} as a sinusoid of at most 10 cycles, R²', '.2f') for i in (1, 2, 3, 4)},
    'power_10': ('power at 10 cycles or fewer', '.1%'), 'read_out_error': ('position read out, error in rows', '.2f'),
    'order_error': ('which row is later, error', '.1%')}
COLORS = ('#1f4e9c', '#8a8a8a', '#d9822b', '#2f9e63')  # the table, initial, random walk, sinusoidal


def text_table(columns, rows, skip_rows):
    """{column: measures} as text, a measure a line, and how to read it. rows: of the table, skipped ones included."""
    lines = [['', *columns]]
    for measure, (label, form) in LABELS.items():
        cells = [row[measure] for row in columns.values()]
        lines.append([label, *('-' if cell is None else format(cell, form) for cell in cells)])
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    text = ['  '.join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))) for line in lines]
    first, walk = next(iter(columns.values())), columns['random walk']
    pair = '' if first['toeplitz'] is None else f', here {first["toeplitz"]:.2f} against {walk["toeplitz"]:.2f}'
    text.append(f"A random walk's components look sinusoidal too: compare the Toeplitz index{pair}.")
    text.append('It is 1 where the cosine of two rows depends on their distance alone. Guessing errs by '
                f'{(rows - skip_rows) / 4:.0f} rows, and in 50 % of pairs.')
    if not skip_rows and first['norm_row0'] > 2 * first['norm_median']:
        text.append('Row 0 is an outlier, over twice the median norm: --skip_rows=1 leaves it out of all other lines.')
    return '\n'.join(text)


def text_shares(blocks):
    """How much of the hidden states' variance the position explains, block by block, as text."""
    lines = ['Share of the position in the variance of hidden states (from noise alone; before training):']
    lines += [f'  block {b["block"]}: {b["share"]:.2%} ({b["noise"]:.2%}; {b["initial_share"]:.2%})' for b in blocks]
    if blocks[-1]['noise'] > blocks[-1]['share'] / 4:
        lines.append('Much of this effect is noise: more --eval_tokens average it away.')
    return '\n'.join(lines)


def draw(columns, skip_rows, title, path):
    """Tables {column: array (T, C)} side by side into a PNG: norms, spectra, cosines, components against position."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter
    fig = Figure(figsize=(15, 12), layout='constrained')
    fig.suptitle(title, fontsize=14, fontweight='bold', x=0.01, ha='left')
    top, middle, bottom = fig.subfigures(3, 1, height_ratios=(1, 1.12, 1), hspace=0.03)
    norms, spectrum, power = top.subplots(1, 3)
    maps, curves = middle.subplots(1, len(columns), sharey=True), bottom.subplots(1, len(columns), sharey=True)
    for axes in (norms, spectrum, power, *curves):
        axes.grid(alpha=0.25)
        axes.spines[['top', 'right']].set_visible(False)
    for (name, table), color, cosines, waves in zip(columns.items(), COLORS, maps, curves):
        used, position, own = table[skip_rows:], np.arange(skip_rows, len(table)), color == COLORS[0]
        style = dict(color=color, label=name, linewidth=2.4 if own else 1.4, zorder=3 if own else 2)
        (shares, components), powers = tables.components(used), tables.power_shares(used)
        norms.plot(position, np.linalg.norm(used, axis=1), **style)
        spectrum.plot(np.arange(1, len(shares) + 1), shares.cumsum(), **style)
        power.plot(np.arange(1, len(powers) + 1), powers, **style)
        image = cosines.imshow(tables.cosine_gram(used), vmin=-1, vmax=1, cmap='RdBu_r', interpolation='nearest',
                               extent=(skip_rows, len(table), len(table), skip_rows))
        for i, curve in enumerate(components.T):                  # one below the other, each as high as its strip
            waves.plot(position, curve / np.abs(curve).max() - 2.3 * i, color=color, linewidth=1.3)
        waves.set(xlabel='position', title=f'{name}: first components')
        cosines.set(xlabel='position', title=f'{name}: cosines of rows')
    norms.set(xlabel='position', ylabel='norm', title='Norm of the rows', yscale='log')
    spectrum.set(xlabel='components', ylabel='share of variance', title='Variance in the first components (dots: 90 %)',
                 xscale='log', ylim=(0, 1.02))
    power.set(xlabel='cycles over the table', ylabel='share of power', title='Power by frequency (DFT down columns)',
              xscale='log', yscale='log')
    for axis in (norms.yaxis, spectrum.xaxis, power.xaxis):       # 1, 2, 5, 10 rather than powers of ten
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter('{x:g}')
        axis.set_minor_formatter(NullFormatter())
    spectrum.yaxis.set_major_formatter(PercentFormatter(1))
    spectrum.axhline(0.9, color='black', linewidth=0.8, linestyle=':')
    spectrum.legend(frameon=False)
    maps[0].set(ylabel='position')
    curves[0].set(yticks=[-2.3 * i for i in range(4)], yticklabels=[f'PC {i + 1}' for i in range(4)])
    middle.colorbar(image, ax=maps, label='cosine', shrink=0.8, pad=0.01)
    fig.savefig(path, dpi=110)
