"""The API's actions: cancel, move and deliver messages, pause and resume schedules and targets."""
