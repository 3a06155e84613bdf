"""`fedsso.glm`: what one person calls who holds the tables of several hospitals.

- `sources`: files, data frames and federations as tables
- `call`: the function itself
"""

from .call import Settings as Settings
from .call import glm as glm
