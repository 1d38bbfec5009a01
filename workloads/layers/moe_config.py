"""The fields of a mixture of experts, and the rules between them. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from orchestrator.workload import FieldConflict, WorkloadConfig, fusible

DEAD_ROUTER = (
    "renormalize=true with k=1 makes every weight the constant 1, so the router's gradient of the task is exactly 0; "
    "write renormalize: auto, exclude this point, or set allow_dead_router: true to demonstrate it"
)


class MoeConfig(WorkloadConfig):
    c_z: float = fusible(0.0, ge=0, description="coefficient of the router z-loss, mean of squared log-sum-exp")
    alpha: float = fusible(0.01, ge=0, description="coefficient of the load-balance loss; load shares sum to 1")
    num_experts: int = Field(8, ge=1, description="experts in a layer")
    k: int = Field(2, ge=1, description="experts per token")
    renormalize: Literal["auto"] | bool = Field(
        "auto", validate_default=True, description="chosen weights sum to 1; auto is true for k >= 2, false for k = 1"
    )
    allow_dead_router: bool = Field(False, description="accept renormalize: true with k: 1")
    capacity_factor: float | None = Field(
        None, gt=0, description="places an expert has, in even shares; null is no limit; training only"
    )

    @field_validator("renormalize", mode="after")
    @classmethod
    def _resolve_renormalize(cls, value: Literal["auto"] | bool, info: ValidationInfo) -> bool:
        """Replaces `auto` by what it means, so that the value that was used is the value that is logged."""
        return bool(info.data.get("k", 2) >= 2) if value == "auto" else value

    @model_validator(mode="after")
    def _check_router(self) -> Self:
        if self.k > self.num_experts:
            raise FieldConflict("k", f"k={self.k} experts per token, but num_experts={self.num_experts}")
        if self.k == 1 and self.renormalize is True and not self.allow_dead_router:
            raise FieldConflict("renormalize", DEAD_ROUTER)
        return self
