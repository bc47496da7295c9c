"""Called by torch when it is imported (entry point ``torch.backends``), so that ``strategy="autopipe_h"`` is known.

A module of its own, outside the package: whatever is wrong with an installation of lightning_autopipe, ``import torch``
must work. ``LIGHTNING_AUTOPIPE_AUTOLOAD=0`` in the environment turns it off.
"""

VARIABLE = "LIGHTNING_AUTOPIPE_AUTOLOAD"


def autoload() -> None:
    """Prepares the registration of the strategy's name; imports neither torch nor Lightning, and never raises."""
    try:
        import os

        if os.environ.get(VARIABLE, "1").strip().lower() in ("0", "false", "no", "off"):
            return
        from lightning_autopipe._register import install

        install()
    except Exception:
        import logging

        logging.getLogger(__name__).warning(
            'lightning_autopipe could not be loaded, so strategy="autopipe_h" is unknown (%s=0 does without it)',
            VARIABLE,
            exc_info=True,
        )
