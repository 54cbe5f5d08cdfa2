"""`sv.elastic.State` in a world of one: its attributes, and uses that are wrong."""

import numpy as np
import pytest

import syncvar as sv
from syncvar.elastic.elastic_state import held_by


def test_objects_are_attributes_as_those_of_a_checkpoint():
    state = sv.elastic.State(v=sv.Variable(1.0), step=3)
    state.step += 1
    assert (float(state.v), state.step, repr(state)) == (1.0, 4, "<sv.elastic.State of v, step>")
    del state.step
    with pytest.raises(AttributeError, match="the state has no object 'step'; it has v"):
        state.step  # noqa: B018
    assert "sv.elastic.State" in state._repr_html_()


def test_a_state_in_a_checkpoint_is_saved_with_it(tmp_path):
    state = sv.elastic.State(v=sv.Variable(1.0), step=3)
    path = sv.Checkpoint(state=state).save(str(tmp_path / "saved"))
    state.v.assign(2.0)
    state.step = 4
    sv.Checkpoint(state=state).restore(path)
    assert (float(state.v), state.step) == (1.0, 3)


@pytest.mark.parametrize(
    ("objects", "text"),
    [
        ({"commit": 1}, "is a method of states"),
        ({"a/b": 1}, "is not a name"),
        ({"fn": print}, "which a checkpoint cannot hold"),
        ({"random": np.random.RandomState(1)}, "default_rng"),
        ({"checkpoint": "folder"}, "sv.CheckpointManager"),
    ],
)
def test_wrong_objects(objects, text):
    with pytest.raises(sv.ConfigError, match=text):
        sv.elastic.State(**objects)


def test_reset_takes_functions():
    with pytest.raises(sv.ConfigError, match="not 3"):
        sv.elastic.State().register_reset(3)


def test_a_restore_needs_a_commit():
    with pytest.raises(sv.UsageError, match="no commit to restore"):
        sv.elastic.State(n=1).restore()


def test_calls_inside_run():
    strategy = sv.MirroredStrategy()
    state = sv.elastic.State(n=1)
    state.commit()
    for call in (state.commit, state.restore):
        with pytest.raises(sv.UsageError, match=r"is called inside strategy\.run"):
            strategy.run(call)
    with strategy.scope():
        state.commit()  # in cross context


def test_the_objects_of_a_job_that_was_left():
    state = sv.elastic.State(v=sv.Variable(1.0))
    state.commit()
    sv.shutdown()
    with pytest.raises(sv.UsageError, match=r"sv\.elastic\.run moves them"):
        state.commit()
    held_by(state).moves_to_current_world()
    state.commit()
    assert float(state.v.assign_add(1.0)) == 2.0


def test_variables_on_servers_stay_there():
    with sv.ParameterServerStrategy().scope():
        state = sv.elastic.State(v=sv.Variable(1.0))
    with pytest.raises(sv.ConfigError, match="servers hold"):
        state.commit()


def test_an_optimizer_without_its_variable():
    optimizer, v = sv.optimizers.Momentum(0.1), sv.Variable(1.0, name="v")
    optimizer.apply_gradients([(1.0, v)])
    with pytest.raises(sv.ConfigError, match="add the variable"):
        sv.elastic.State(optimizer=optimizer).commit()


def test_a_commit_does_not_slow_down_later_writes():
    v = sv.Variable(np.zeros(1000), name="v")
    state = sv.elastic.State(v=v, data=[1], step=0)
    places = set()
    for _ in range(5):
        v.assign_add(np.ones(1000))
        places.add(v.local_value().ctypes.data)
        state.data = [*state.data, 2]
        state.commit()
    assert len(places) == 1  # the snapshot is a copy, so the variable is written in place
    state.data.append(3)
    state.restore()
    assert state.data == [1, 2, 2, 2, 2, 2]
