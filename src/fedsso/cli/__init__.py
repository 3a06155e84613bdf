"""The command `fedsso`: what users type, and what they see on the terminal.

Nothing is computed here. A command goes through these modules in order:

- `main`: the sub-commands, and how the program ends
- `options`, `flags`: the options, most of them made from the records that declare them
- `config`, `settings`: a settings file, checked and joined with the options
- `plan`, `replace`: the data and the runs, checked before anything is written
- `runs`, `sweep`, `glm`, `paper`, `data`, `lists`, `report`: the commands
- `watch`, `live`, `tensorboard`: progress while runs train
- `view`, `screen`: results on the terminal
"""
