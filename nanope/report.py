"""A comparison to read: tables for the terminal, and report.html, one file with everything in it. Both say what report.json says."""
import html
import io
import os
import re
import shlex
import textwrap
from pathlib import Path

from nanope import plots
from nanope.files import make_folder, write_json


# ---- numbers as text -------------------------------------------------------------------------------------------------

def cell(value, form='.4f'):
    return '-' if value is None else format(value, form)


def plus_minus(mean, interval, form, scale=1):
    """'1.234 ± 0.012': a mean over seeds and half the width of its 95 % interval, where there is one."""
    if mean is None:
        return '-'
    half = f' ± {scale * (interval[1] - interval[0]) / 2:{form.lstrip("+")}}' if interval else ''
    return f'{scale * mean:{form}}{half}'


def of(part, name, form, scale=1):
    return plus_minus(part[f'{name}_mean'], part[f'{name}_ci95'], form, scale)


def verdict(difference):
    """What an interval of differences says, in a word or two."""
    if difference is None:
        return 'reference'
    if difference['ci95'] is None:
        return 'one seed: no interval' if difference['pairs'] else 'no seed in common'
    low, high = difference['ci95']
    return 'better' if high < 0 else 'worse' if low > 0 else 'not told apart'


# ---- tables: (heading, note, [row of cells], cells of a row that are words), the head first --------------------------

def runs_table(report):
    rows = [('run', 'scheme', 'seed', 'step', 'parameters', 'position table', 'val loss', '± stderr', 'bits/byte', 'spikes', 'tokens/s')]
    columns = (('seed', 'd'), ('step', ',d'), ('params', ',d'), ('wpe_params', ',d'), ('val_loss', '.4f'), ('val_stderr', '.4f'),
               ('bits_per_byte', '.4f'), ('spikes', 'd'), ('tokens_per_s', ',.0f'))
    for row in report['runs'] + report['failed']:
        shown = {**row, 'spikes': len(row['spikes'])} if 'spikes' in row else row
        cells = [cell(shown.get(key), form) for key, form in columns]
        cells[1] = 'failed' if row in report['failed'] else cells[1]
        rows.append((row['name'], ' + '.join(filter(None, (row['wpe'], row['extension']))), *cells))
    note = (f'windows of {report["length"]} tokens end to end; the standard error is over windows; spikes: jumps of the training loss; '
            'tokens/s is the median while training')
    return 'Runs', note, rows, (0, 1)


def schemes_table(report):
    one = [scheme for scheme in report['schemes'] if scheme['difference'] and len(scheme['difference']['pairs']) == 1]
    head = ['scheme', 'seeds', 'val loss ± 95 %', 'bits/byte', f'minus {report["reference"]} ± 95 %', 'verdict']
    head += ['± stderr over windows'] if one else []
    sliding = any(scheme['sliding_change_mean'] is not None for scheme in report['schemes'])  # as a change, where all tokens were scored
    head += ['sliding window: change'] if sliding else []
    rows = [head]
    for scheme in report['schemes']:
        found = scheme['difference']
        row = [scheme['scheme'], str(scheme['n_seeds']), of(scheme, 'val_loss', '.4f'), cell(scheme['bits_per_byte_mean']),
               plus_minus(found['mean'], found['ci95'], '+.4f') if found else '-', verdict(found)]
        row += [cell(found['pairs'][0]['window_stderr'] if scheme in one else None)] if one else []
        row += [of(scheme, 'sliding_change', '+.4f')] if sliding else []
        rows.append(row)
    note = "± is half a 95 % interval over seeds (Student's t); differences are paired by seed"
    if one:
        note += '. With one seed there is none: the standard error over windows tells two models apart, not two schemes'
    return 'Schemes', note, rows, (0, 5)


def lengths_table(report, heading, note, protocol, name, form, scale=1):
    """A row a scheme, a column a context length; of changes, none where they are zero by definition."""
    def columns(scheme):
        return [part for part in scheme[protocol] if name != 'change' or part['length'] != report['length']]
    rows = [('scheme', *(f'{part["length"]:,}' for part in columns(report['schemes'][0])))]
    rows += [(scheme['scheme'], *(of(part, name, form, scale) for part in columns(scheme))) for scheme in report['schemes']]
    return heading, note, rows, (0,)


def tables(report):
    """All tables of a report."""
    found, first, tuned = [schemes_table(report)], report['schemes'][0], report.get('sweep')
    if tuned:
        rows = [('scheme', *next(iter(tuned['losses'].values())))]
        rows += [(wpe, *(cell(loss) + '*' * (value == tuned['best'][wpe]) for value, loss in losses.items()))
                 for wpe, losses in tuned['losses'].items()]
        note = 'final validation loss with seed 0; * the value that the seeds compared were trained with'
        found.append((f'Sweep of {tuned["setting"]}', note, rows, (0,)))
    if first['context']:
        found += [lengths_table(report, 'Same targets by tokens of context', 'nats a token; - where a learned table has no rows',
                                'context', 'loss', '.3f'),
                  lengths_table(report, f'Change against {report["length"]} tokens of context', 'same targets, so how hard the text is '
                                'cancels; + is worse', 'context', 'change', '+.3f')]
    if first['retrieval']:
        chance = f'% answered rightly; {first["retrieval"][0]["chance"]:.0%} is chance'
        gained = 'nats a token gained from having seen the same random tokens half the length before; 0 is nothing'
        found += [lengths_table(report, 'Key-value retrieval by length', chance, 'retrieval', 'accuracy', '.0f', 100),
                  lengths_table(report, 'Induction by length', gained, 'induction', 'score', '+.3f')]
    return [runs_table(report), *found]


def text_table(rows, words):
    """Rows of cells as lines of text, columns of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [[c.ljust(w) if i in words else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))] for row in rows]
    return '\n'.join('  '.join(line).rstrip() for line in lines)


def text(report):
    """The report for a terminal."""
    return '\n\n'.join(f'{heading.upper()}\n{text_table(rows, words)}\n{textwrap.fill(note, 110)}'
                       for heading, note, rows, words in tables(report))


# ---- the page --------------------------------------------------------------------------------------------------------

def findings(report):
    """What the numbers say, in sentences."""
    plain = [scheme for scheme in report['schemes'] if not scheme['extension']] or report['schemes']
    best = min(plain, key=lambda scheme: scheme['val_loss_mean'])
    found = [f'Lowest validation loss at {report["length"]} tokens: {best["scheme"]}, {of(best, "val_loss", ".4f")} nats a token.']
    words = {'better': [], 'worse': []}
    for scheme in plain:
        if scheme['difference']:
            mean = cell(scheme['difference']['mean'], '+.4f')
            words.setdefault(verdict(scheme['difference']), []).append(f'{scheme["scheme"]} ({mean})')
    if any(words.values()):
        said = '; '.join(f'{word}: {", ".join(each)}' for word, each in words.items() if each)
        found.append(f'Against {report["reference"]}: {said}.')
    for n, length in [(n, part['length']) for n, part in enumerate(plain[0]['context']) if part['length'] == 2 * report['length']]:
        changes = [(scheme['scheme'], scheme['context'][n]['change_mean']) for scheme in plain]
        said = ', '.join(f'{name} {"has no rows there" if change is None else f"{change:+.3f}"}' for name, change in changes)
        found.append(f'The same targets after {length} tokens of context instead of {report["length"]}: {said}.')
    return found


def svg(draw):
    """A panel of plots.panels as the text of an SVG, the same for the same numbers."""
    import matplotlib
    fig, (axes,) = plots.figure()
    draw(axes)
    file = io.StringIO()
    with matplotlib.rc_context({'svg.hashsalt': 'nanope', 'svg.fonttype': 'none'}):
        fig.savefig(file, format='svg', metadata={'Date': None, 'Creator': None})
    return file.getvalue()[file.getvalue().index('<svg'):]


def escaped(text):
    """Text for HTML, its minus signs as such."""
    return html.escape(re.sub(r'(?<![\w.-])-(?=\d|$)', '−', text))


def html_table(heading, note, rows, words):
    def line(row, tag):
        cells = []
        for i, each in enumerate(row):
            kind = ('word ' if i in words else 'number ') + (each if each in ('better', 'worse') else '')
            cells.append(f'<{tag} class="{kind.strip()}">{escaped(each)}</{tag}>')
        return '<tr>' + ''.join(cells) + '</tr>'
    body = '\n'.join(line(row, 'td') for row in rows[1:])
    return (f'<h2>{html.escape(heading)}</h2>\n<p class="soft">{escaped(note)}</p>\n<div class="scroll"><table>'
            f'<thead>{line(rows[0], "th")}</thead>\n<tbody>{body}</tbody></table></div>')


def page(report):
    """report.html as text: everything inlined, no dates, nothing fetched."""
    runs, *others = [html_table(*table) for table in tables(report)]
    figures = '\n'.join(f'<figure>{svg(draw)}</figure>' for draw in plots.panels(report).values())
    warnings = ''.join(f'<p class="warning">{html.escape(line)}</p>' for line in report['warnings'])
    points = ''.join(f'<li>{escaped(sentence)}</li>' for sentence in findings(report))
    protocols = ''.join(f'<dt>{html.escape(name)}</dt><dd>{escaped(about)}</dd>' for name, about in report['protocols'].items())
    machine = ', '.join(f'{key} {value}' for key, value in report['machine'].items())
    plain = ', '.join(scheme['scheme'] for scheme in report['schemes'] if not scheme['extension'])
    extended = sum(scheme['extension'] is not None for scheme in report['schemes'])
    about = (plain or 'no plain run') + (f' and {extended} of extended context' if extended else '')
    about += f': {len(report["runs"])} runs, trained on {report["dataset"]}, scored at {report["length"]} tokens'
    style = Path(__file__).with_name('report.css').read_text('utf-8')
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Position schemes compared</title><style>{style}</style></head><body>
<h1>Position schemes compared</h1>
<p class="soft">{html.escape(about)}.</p>
<ul class="findings">{points}</ul>
{warnings}
<div class="figures">{figures}</div>
{chr(10).join(others)}
{runs}
<h2>How it was measured</h2>
<dl>{protocols}</dl>
<h2>Command and machine</h2>
<pre>{html.escape(shlex.join(report['command']))}</pre>
<p class="soft">{html.escape(machine)}</p>
</body></html>
"""


def write(report, folder):
    """report.json, report.html and compare.png."""
    make_folder(folder)
    write_json(os.path.join(folder, 'report.json'), report)
    plots.comparison(report, os.path.join(folder, 'compare.png'))
    with open(os.path.join(folder, 'report.html'), 'w', encoding='utf-8') as file:
        file.write(page(report))
