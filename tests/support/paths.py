"""Where things are in the repository."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
REPOSITORY = TESTS.parent
GOLDEN = TESTS / "golden"
RANK_SCRIPTS = TESTS / "support" / "rank_scripts"  # programs that ranks run
CONFIGS = REPOSITORY / "configs"
PROFILE = CONFIGS / "ci.toml"
BENCH = REPOSITORY / "bench"
