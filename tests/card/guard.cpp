// Makes a torch without CUDA accept tensors that say cuda:0: a device guard and hooks that do nothing, so that autograd
// runs on them. Must be loaded before torch, which looks its hooks up once (card.py).
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
struct PretendGuard : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device card() noexcept { return Device(DeviceType::CUDA, 0); }
  static Stream only() noexcept { return Stream(Stream::DEFAULT, card()); }
  Device getDevice() const override { return card(); }
  Device exchangeDevice(Device) const override { return card(); }
  Stream getStream(Device) const noexcept override { return only(); }
  Stream getDefaultStream(Device) const override { return only(); }
  Stream getNewStream(Device, int = 0) const override { return only(); }
  Stream exchangeStream(Stream) const noexcept override { return only(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, PretendGuard);
}  // namespace c10::impl

namespace at {
struct PretendHooks : CUDAHooksInterface {
  explicit PretendHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  bool isPinnedPtr(const void*) const override { return false; }
  void deviceSynchronize(DeviceIndex) const override {}
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", PretendHooks)
}  // namespace at
