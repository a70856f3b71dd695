"""A run that starts from another run's weights: --init_from=FOLDER, --train_only=wpe."""
import torch

from nanope import checkpoint
from runs import losses, start, train, weights


def model(place, out_dir, step='latest'):
    return checkpoint.load(place / out_dir, step).tensors('model')


def test_it_starts_from_the_other_runs_weights_with_a_fresh_optimizer(place):
    assert train(place).code == 0
    before = model(place, 'out/a')
    assert train(place, out_dir='out/b', init_from='out/a', learning_rate=0.0, min_lr=0.0, max_iters=1).code == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model(place, 'out/b').items())  # a rate of 0 moves nothing
    assert checkpoint.load(place / 'out/b').step == 1  # and its own count of updates
    assert checkpoint.load(place / 'out/b').state['origin'] == {'run': 'out/a', 'step': 6}


def test_the_model_is_what_the_checkpoint_says_whatever_the_settings(place):
    assert train(place, wpe='rope', rope_base=500.0, n_layer=2).code == 0
    done = train(place, out_dir='out/b', init_from='out/a', wpe='learned', n_layer=1)
    assert done.code == 0 and 'rope_base=500.0, from' in done.text
    config = checkpoint.model_config(checkpoint.load(place / 'out/b'))
    assert (config.wpe, config.rope_base, config.n_layer) == ('rope', 500.0, 2)


def test_train_only_wpe_moves_the_table_and_nothing_else(place):
    assert train(place).code == 0
    assert train(place, out_dir='out/b', init_from='out/a', train_only='wpe').code == 0
    before, after = model(place, 'out/a'), model(place, 'out/b')
    assert {name for name in before if not torch.equal(before[name], after[name])} == {'transformer.wpe.weight'}


def test_stopped_and_resumed_it_is_as_if_never_stopped(place):
    assert train(place).code == 0
    assert train(place, out_dir='out/b', init_from='out/a', train_only='wpe', max_iters=6).code == 0
    assert train(place, out_dir='out/c', init_from='out/a', train_only='wpe', max_iters=3).code == 0
    assert train(place, out_dir='out/c', init_from='resume', train_only='wpe', max_iters=6, n_layer=2).code == 0  # n_layer: from there
    assert weights(place, 6, 'out/b') == weights(place, 6, 'out/c') and losses(place, 'out/b') == losses(place, 'out/c')


def test_what_does_not_fit_is_refused_in_one_line_and_leaves_no_folder(place):
    for settings, why in [(dict(init_from='out/none'), 'out/none'), (dict(init_from='out/a'), 'the run folder itself'),
                          (dict(out_dir='out/b', init_from='out/a', train_only='wpe'), 'no position table')]:
        assert train(place, wpe='rope', out_dir='out/a', overwrite='true').code == 0
        done = train(place, **{'overwrite': 'true', **settings})
        assert done.code == 2 and why in done.text and done.text.count('error:') == 1
        assert not (place / 'out/b').exists() and (place / 'out/a/ckpt').exists()


def test_another_vocabulary_is_refused(place):
    assert train(place).code == 0
    (place / 'abc.txt').write_text('abc ' * 2000)
    assert start(place, 'prepare.py', 'abc', '--input=abc.txt').wait() == 0
    done = train(place, dataset='abc', out_dir='out/b', init_from='out/a')
    assert done.code == 2 and 'another vocabulary' in done.text
