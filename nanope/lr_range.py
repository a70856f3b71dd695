"""The learning-rate range test (Smith 2017, "Cyclical learning rates", section 3.3): a short run while the rate rises exponentially.

It saves no checkpoint, and its records are of an event of their own, 'lr_range': nothing takes it for a training run."""
import math
import os

from tqdm import tqdm

from nanope import metrics, parallel, plots

SMOOTHING = 0.9   # of the loss, a moving average whose start is corrected as in Adam
DIVERGED = 1.5    # times the first loss: the test ends there


def bounds(text):
    """'1e-5:1' -> (1e-5, 1.0). Raises ValueError."""
    try:
        low, high = map(float, text.split(':'))
    except ValueError:
        low = high = 0.0
    if not 0 < low < high < math.inf:
        raise ValueError(f'lr_range={text} must be two learning rates, the lower one first, as in 1e-5:1')
    return low, high


def problems(config):
    """What is wrong with a config's lr_range, as for TrainConfig.problems()."""
    try:
        if config.lr_range is not None:
            bounds(config.lr_range)
    except ValueError as error:
        return [str(error)]
    return [f'lr_range={config.lr_range}: a range test is not saved, so there is none to resume'] * bool(
        config.lr_range and config.init_from == 'resume')


def folder(config):
    """The run folder: a test's is neither in the way of the run that is to follow, nor mistaken for it."""
    return os.path.normpath(config.out_dir) + '_lr_range' if config.lr_range else config.out_dir


def rate(config, step):
    """The learning rate at update `step` of the test: from the lower bound at 0 to the upper one at max_iters - 1."""
    low, high = bounds(config.lr_range)
    return low * (high / low) ** (step / max(config.max_iters - 1, 1))


def run_test(config, update):
    """Raise the rate until the loss has diverged or max_iters is over; then print what to take, and draw lr_range.png.

    update(step, lr) -> (loss, gradient norm, whether to stop), the same in all processes."""
    first, points, average = parallel.rank == 0, [], 0.0  # points: (rate, loss, smoothed loss)
    for step in tqdm(range(config.max_iters), 'learning-rate range test', disable=None, leave=False):
        lr = rate(config, step)
        loss, _, stop = update(step, lr)
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        if stop or not math.isfinite(loss):
            break
        points.append((lr, loss, average / (1 - SMOOTHING ** (step + 1))))
        if first:
            metrics.append(config.out_dir, {'event': 'lr_range', 'step': step, 'loss': loss, 'lr': lr})
        if points[-1][2] > DIVERGED * points[0][1]:
            break
    if stop:
        print(f'stopped after {len(points)} updates; a range test is not saved: the same command runs it again')
        return stop
    print(verdict(points, config.max_iters))
    if first:
        draw(points, suggestion(points), os.path.join(config.out_dir, 'lr_range.png'))
        print(f'wrote {config.out_dir}/lr_range.png')
    return stop


def suggestion(points):
    """A tenth of the rate at which the smoothed loss was lowest, or None where that is at an end, so that the range shows no minimum."""
    lowest = min(range(len(points)), key=lambda i: points[i][2], default=0)
    inside = len(points) / 10 <= lowest < len(points) - 1 and points[-1][2] > 1.02 * points[lowest][2]
    return points[lowest][0] / 10 if inside else None


def verdict(points, max_iters):
    """Two lines: how the loss went, and a peak rate to take from it or why there is none."""
    if not points:
        return 'the very first loss is not finite: nothing can be said'
    lr, _, lowest = min(points, key=lambda point: point[2])
    end = f'it stood at {points[-1][2]:.3f} at {points[-1][0]:.2g}' + (' and diverged' if len(points) < max_iters else '')
    told = f'smoothed loss: {points[0][2]:.3f} at first, {lowest:.3f} at a learning rate of {lr:.2g}, the lowest; {end}\n'
    best = suggestion(points)
    if best:
        return told + (f'peaks to try: --learning_rate={best:.1e} (cautious) to {best * 10 / 3:.1e} (bold), a tenth and a third '
                       'of that rate; from one short run without warm-up, so a start for a search and no optimum')
    if points[-1][2] <= 1.02 * lowest:
        return told + 'no suggestion: the loss had not risen yet when the test ended; raise the upper bound of --lr_range'
    return told + 'no suggestion: the loss rose from the start; lower the lower bound of --lr_range, or take more --max_iters'


def draw(points, best, path):
    """Loss over rate into a PNG: each update thin, smoothed thick, dotted what is suggested."""
    fig, (axes,) = plots.figure()
    rates, losses, smooth = zip(*points) if points else ((), (), ())
    axes.plot(rates, losses, color='#0072B2', alpha=0.35, linewidth=0.8)
    axes.plot(rates, smooth, color='#0072B2', linewidth=1.4)
    if best:
        axes.axvline(best, color='#999999', linewidth=0.8, linestyle=':')
    axes.set(xscale='log', xlabel='learning rate', ylim=(None, 1.05 * max((max(smooth, default=1), *losses[:1]))))
    plots.title(axes, 'Learning-rate range test', 'nats a token; thick: smoothed' + (f'; dotted: {best:.1e}' if best else ''))
    fig.savefig(path, dpi=180)
