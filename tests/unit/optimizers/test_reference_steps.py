"""Ten steps of every optimizer against other libraries.

The constants were computed in float64 with torch 2.13.0 (torch.optim; SGD to Adagrad) and with optax 0.2.8 under jax 0.10.2
(LAMB: optax.lamb; clipping: optax.clip_by_global_norm and optax.clip before optax.sgd), starting from START with the gradients
of `gradient`, one optimizer for each entry, with the same numbers as here.
"""

import numpy as np
import pytest

import syncvar as sv
from syncvar.optimizers import LAMB, SGD, Adagrad, Adam, AdamW, Momentum, Nesterov, RMSProp

START = [1.0, -2.0, 0.5, 3.0, -0.25, 1.5]


def gradient(step):
    i = np.arange(6, dtype=np.float64)
    return np.sin(1.0 + i + 0.7 * step) * (1.0 + i) / 4


EXPECTED = {
    "SGD": [0.9783640426692863, -2.046329801346026, 0.4898115764991288, 3.0779800594635667, -0.1276872793154652, 1.5416359388595136],
    "SGD decay": [0.9686681873115849, -2.0264713778124563, 0.48397223431743447, 3.0469766709691077, -0.12529939495616077, 1.5282794689741206],
    "Momentum": [0.8464927654490996, -1.9641146870528532, 1.0186884556491305, 3.675558890410799, -0.2019656938185271, 0.5489489757213059],
    "Momentum schedule": [0.9256337560281881, -2.057220474788371, 0.6303496685023571, 3.3022495534726644, -0.05898412078168837, 1.2943208377888054],
    "Nesterov": [0.840207531573476, -2.014033019693594, 0.9566311865833464, 3.685983060833285, -0.08445640375213943, 0.6856900170086887],
    "Nesterov decay": [0.7996767979219105, -1.9183195940385371, 0.9187697692390306, 3.520285158635245, -0.08329907380668301, 0.6406296010936644],
    "RMSProp": [0.9623177410103094, -2.0234411128597944, 0.5039338963868305, 3.0402123351213377, -0.22366042705703185, 1.4959232592759366],
    "RMSProp centered": [0.8114596151127307, -2.036424167861267, 0.617416481057369, 3.216091037376066, -0.19119375664929084, 1.3832136877359136],
    "Adam": [0.626741567725969, -2.1254538853241174, 0.7493108246057177, 3.400305703363788, -0.08066867067097254, 1.2931365066626377],
    "Adam decay": [0.6869842484912064, -2.0509191376718183, 0.679512317098898, 3.284856848583252, -0.12140982159609466, 1.3313305372074355],
    "AdamW": [0.5907570558179356, -2.020788775911806, 0.718130658904452, 3.2387475243054022, -0.07688871713315307, 1.2245339380032227],
    "Adagrad": [0.875066093117617, -2.066960524529937, 0.52809565095521, 3.13400407787688, -0.1725975410117387, 1.4714580557623833],
    "Adagrad initial": [0.9177261358180312, -2.0327389943000527, 0.5649877792371899, 3.1109383092042457, -0.1746451791849526, 1.4542197907529248],
    "LAMB": [0.38533031141956364, -1.8042914840524553, 1.0348989962557158, 3.297075923904526, -0.1469579549112473, 0.820159740442058],
    "clip_norm": [0.9889070799160381, -2.0237205780450584, 0.4948299112090737, 3.0399920603693698, -0.18736367926348488, 1.52123402590603],
    "clip_value": [0.9783640426692863, -2.033359456988885, 0.49394791852589415, 3.035648928549507, -0.23242988986884275, 1.5412726680692714],
}  # fmt: skip

MAKERS = {
    "SGD": lambda: SGD(0.1),
    "SGD decay": lambda: SGD(0.1, weight_decay=0.01),
    "Momentum": lambda: Momentum(0.1),
    "Momentum schedule": lambda: Momentum(lambda step: 0.1 / (step + 1)),
    "Nesterov": lambda: Nesterov(0.1),
    "Nesterov decay": lambda: Momentum(0.1, nesterov=True, weight_decay=0.01),
    "RMSProp": lambda: RMSProp(0.01, rho=0.9, epsilon=1e-3),
    "RMSProp centered": lambda: RMSProp(0.01, rho=0.9, epsilon=1e-3, momentum=0.8, centered=True),
    "Adam": lambda: Adam(0.1, epsilon=1e-3),
    "Adam decay": lambda: Adam(0.1, beta_1=0.8, beta_2=0.95, weight_decay=0.01),
    "AdamW": lambda: AdamW(0.1, weight_decay=0.05),
    "Adagrad": lambda: Adagrad(0.1, epsilon=1e-3),
    "Adagrad initial": lambda: Adagrad(0.1, initial_accumulator_value=0.1, weight_decay=0.01),
    "LAMB": lambda: LAMB(0.1, epsilon=1e-3, weight_decay=0.02),
    "clip_norm": lambda: SGD(0.1, clip_norm=0.8),
    "clip_value": lambda: SGD(0.1, clip_value=0.3),
}


def ten_steps(optimizer, dtype, shape=(6,), **options):
    v = sv.Variable(np.array(START, dtype).reshape(shape), **options)
    for step in range(10):
        optimizer.apply_gradients([(gradient(step).astype(dtype).reshape(shape), v)])
    return v.numpy().reshape(-1)


@pytest.mark.parametrize("name", EXPECTED)
def test_ten_steps_in_float64(name):
    np.testing.assert_allclose(ten_steps(MAKERS[name](), "float64"), EXPECTED[name], rtol=2e-12)


@pytest.mark.parametrize("name", EXPECTED)
def test_ten_steps_in_float32(name):
    np.testing.assert_allclose(
        ten_steps(MAKERS[name](), "float32", (2, 3)), EXPECTED[name], rtol=3e-6
    )


def test_ten_steps_of_float32_like_those_of_torch_in_float32():
    # torch 2.13.0, torch.optim.Adam(lr=0.1, eps=1e-3) on float32 tensors
    expected = [
        0.6267417073249817,
        -2.1254537105560303,
        0.7493109107017517,
        3.40030574798584,
        -0.08066867291927338,
        1.2931365966796875,
    ]
    np.testing.assert_allclose(ten_steps(Adam(0.1, epsilon=1e-3), "float32"), expected, rtol=4e-7)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 1.6e-2)])
def test_half_types_follow_because_their_masters_are_float32(name, dtype, tolerance):
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    made = ten_steps(MAKERS[name](), kind).astype(np.float64)
    np.testing.assert_allclose(made, EXPECTED[name], rtol=tolerance, atol=tolerance)


def test_a_half_variable_gathers_updates_smaller_than_its_last_place():
    v = sv.Variable(np.ones(3, np.float16))
    optimizer = SGD(1e-5)
    for _ in range(1000):  # each is a fiftieth of the distance to the next float16 below 1
        optimizer.apply_gradients([(np.ones(3, np.float16), v)])
    assert np.abs(v.numpy().astype(float) - 0.99).max() < 5e-4  # one place of a float16 there


def test_what_the_program_writes_to_a_half_variable_is_where_the_next_step_begins():
    v = sv.Variable(np.array([1.0, 2.0, np.nan], np.float16))
    optimizer = SGD(0.25)
    optimizer.apply_gradients([([1.0, 1.0, 1.0], v)])
    v.assign(np.array([8.0, 1.75, 3.0], np.float16))
    optimizer.apply_gradients([([1.0, 1.0, 1.0], v)])
    assert v.numpy().tolist() == [7.75, 1.5, 2.75]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_large_variable_is_stepped_in_blocks_like_a_small_one(name):
    count = 6 * 7000  # more than two blocks
    large = sv.Variable(np.tile(np.array(START), 7000).reshape(70, 600))
    options = {"clip_norm": 0.8 * np.sqrt(7000)} if name == "clip_norm" else {}
    optimizer = SGD(0.1, **options) if options else MAKERS[name]()
    for step in range(10):
        optimizer.apply_gradients([(np.tile(gradient(step), 7000).reshape(70, 600), large)])
    made = large.numpy().reshape(-1)
    assert made.size == count
    np.testing.assert_allclose(made[:6], EXPECTED[name], rtol=1e-11)
    np.testing.assert_allclose(made[-6:], EXPECTED[name], rtol=1e-11)


def test_the_power_is_that_of_mathematics():
    from syncvar.optimizers.update_rules import power

    for exponent in (0, 1, 2, 3, 10, 1000, 123_457):
        assert power(0.999, exponent) == pytest.approx(0.999**exponent, rel=1e-11)
